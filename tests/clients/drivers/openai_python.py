"""Driver of openai-python: chats, typed output, tools, and their histories."""

from __future__ import annotations

import client_paths as paths
import openai
from client_paths import Server
from typed_answer import WEATHER_QUESTION, WEATHER_TOOL, Capital


def connect(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="any", max_retries=0, timeout=120)


def ask(server: Server, messages: list, **rest: object) -> object:
    rest = {"max_tokens": paths.MAX_TOKENS, "temperature": 0} | rest
    return connect(server).chat.completions.create(model=server.model, messages=messages, **rest)


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def plain(server: Server) -> None:
    answer = ask(server, [user(paths.QUESTION)])
    paths.check("Paris" in answer.choices[0].message.content, answer)
    paths.check(answer.usage.completion_tokens > 0, answer)


def streamed(server: Server) -> None:
    chunks = list(ask(server, [user(paths.QUESTION)], stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    paths.check("Paris" in text, text)
    paths.check(chunks[-1].usage.completion_tokens > 0, chunks[-1])


def structured(server: Server) -> None:
    answer = connect(server).chat.completions.parse(
        model=server.model,
        messages=[user(paths.QUESTION)],
        response_format=Capital,
        max_tokens=100,
        temperature=0,
    )
    paths.check(isinstance(answer.choices[0].message.parsed, Capital), answer)


def tools(server: Server) -> None:
    """Forced calls, whole and streamed, and the history with their results as the client writes it."""
    history: list = [user(WEATHER_QUESTION)]
    forced = {"tools": [WEATHER_TOOL], "tool_choice": "required", "max_tokens": 200}
    message = ask(server, history, **forced).choices[0].message
    paths.check(message.tool_calls and message.tool_calls[0].function.name == "get_weather", message)
    with connect(server).chat.completions.stream(
        model=server.model, messages=history, temperature=0, **forced
    ) as stream:
        streamed = stream.get_final_completion().choices[0].message
    whole = [call.function.arguments for call in message.tool_calls]
    paths.check([call.function.arguments for call in streamed.tool_calls] == whole, streamed)
    for turn in (message, streamed.model_dump()):
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sun"}
            for call in message.tool_calls
        ]
        answered = [*history, turn, *results]
        paths.check(ask(server, answered, tools=[WEATHER_TOOL], tool_choice="none").choices, answered)
        paths.check(ask(server, answered, tools=[WEATHER_TOOL]).choices, answered)


def second_turn(server: Server) -> None:
    """A parsed message, dumped with every member that the client adds, and asked on."""
    first = connect(server).chat.completions.parse(
        model=server.model,
        messages=[user(paths.QUESTION)],
        response_format=Capital,
        max_tokens=100,
        temperature=0,
    )
    message = first.choices[0].message
    for turn in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        answer = ask(server, [user(paths.QUESTION), turn, user(paths.FOLLOW_UP)])
        paths.check(answer.choices[0].message.content, answer)


def overflow(server: Server) -> str:
    return paths.expect_overflow(lambda: ask(server, [user(paths.LONG_PROMPT)]), openai.BadRequestError)


def cancel(server: Server) -> None:
    stream = ask(server, [user(paths.STORY)], stream=True, max_tokens=paths.ENDLESS_TOKENS)
    for number, _ in enumerate(stream):
        if number == 3:
            break
    stream.close()
    paths.expect_idle(server)


def images(server: Server) -> None:
    """Ask about two images, whole and streamed, in chats and by the Responses API."""
    paths.check_images({seed: [*_chats(server, seed), *_responses(server, seed)] for seed in (1, 2)})


def _chats(server: Server, seed: int) -> list[tuple[str, int]]:
    image = {"type": "image_url", "image_url": {"url": paths.png_url(seed), "detail": "high"}}
    turn = {"role": "user", "content": [image, {"type": "text", "text": paths.IMAGE_QUESTION}]}
    whole = ask(server, [turn])
    *chunks, last = ask(server, [turn], stream=True, stream_options={"include_usage": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return [(whole.choices[0].message.content, whole.usage.prompt_tokens), (text, last.usage.prompt_tokens)]


def _responses(server: Server, seed: int) -> list[tuple[str, int]]:
    image = {"type": "input_image", "image_url": paths.png_url(seed), "detail": "auto"}
    turn = {"role": "user", "content": [image, {"type": "input_text", "text": paths.IMAGE_QUESTION}]}
    asked = {"model": server.model, "input": [turn], "max_output_tokens": paths.MAX_TOKENS, "temperature": 0}
    whole = connect(server).responses.create(**asked)
    *events, last = connect(server).responses.create(**asked, stream=True)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    return [
        (whole.output_text, whole.usage.input_tokens),
        (text, last.response.usage.input_tokens),
    ]


if __name__ == "__main__":
    paths.report(
        {
            "plain": plain,
            "streamed": streamed,
            "structured": structured,
            "tools": tools,
            "second turn": second_turn,
            "overflow": overflow,
            "cancel": cancel,
            "images": images,
        }
    )
