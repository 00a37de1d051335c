"""Driver of litellm's `openai/` route."""

from __future__ import annotations

import client_paths as paths
import litellm
from client_paths import Server
from typed_answer import WEATHER_QUESTION, WEATHER_TOOL, Capital


def ask(server: Server, messages: list, **rest: object) -> object:
    rest = {"max_tokens": paths.MAX_TOKENS, "temperature": 0} | rest
    return litellm.completion(
        model=f"openai/{server.model}",
        api_base=server.url,
        api_key="any",
        max_retries=0,
        timeout=120,
        messages=messages,
        **rest,
    )


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def plain(server: Server) -> None:
    answer = ask(server, [user(paths.QUESTION)])
    paths.check("Paris" in answer.choices[0].message.content, answer)
    paths.check(answer.usage.completion_tokens > 0, answer)


def streamed(server: Server) -> None:
    chunks = list(ask(server, [user(paths.QUESTION)], stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)
    paths.check("Paris" in whole.choices[0].message.content, whole)
    paths.check(whole.usage.completion_tokens > 0, whole)


def structured(server: Server) -> None:
    answer = ask(server, [user(paths.QUESTION)], response_format=Capital, max_tokens=100)
    Capital.model_validate_json(answer.choices[0].message.content)


def tools(server: Server) -> None:
    """A forced call, and its result in the history with the members that litellm adds."""
    history: list = [user(WEATHER_QUESTION)]
    message = (
        ask(server, history, tools=[WEATHER_TOOL], tool_choice="required", max_tokens=200).choices[0].message
    )
    paths.check(message.tool_calls and message.tool_calls[0].function.name == "get_weather", message)
    results = [
        {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "18 degrees, sun"}
        for call in message.tool_calls
    ]
    for turn in (message, message.model_dump()):
        paths.check(ask(server, [*history, turn, *results], tools=[WEATHER_TOOL]).choices, turn)


def second_turn(server: Server) -> None:
    """An answer as litellm dumps it, with a mark for prompt caching, and asked on."""
    message = ask(server, [user(paths.QUESTION)]).choices[0].message
    cached = {
        "role": "user",
        "content": [{"type": "text", "text": paths.QUESTION, "cache_control": {"type": "ephemeral"}}],
    }
    for turn in (message, message.model_dump()):
        paths.check(ask(server, [user(paths.QUESTION), turn, user(paths.FOLLOW_UP)]).choices, turn)
    paths.check(ask(server, [cached, message, user(paths.FOLLOW_UP)]).choices, cached)


def overflow(server: Server) -> str:
    return paths.expect_overflow(
        lambda: ask(server, [user(paths.LONG_PROMPT)]), litellm.ContextWindowExceededError
    )


def cancel(server: Server) -> None:
    stream = ask(server, [user(paths.STORY)], stream=True, max_tokens=paths.ENDLESS_TOKENS)
    for number, _ in enumerate(stream):
        if number == 3:
            break
    stream.completion_stream.close()
    paths.expect_idle(server)


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
        }
    )
