"""Driver of Anthropic's Python client at /v1/messages: typed output, tools, and their histories."""

from __future__ import annotations

import anthropic
import client_paths as paths
from client_paths import Server
from typed_answer import WEATHER_QUESTION, WEATHER_TOOL, Capital

TOOL = {
    "name": WEATHER_TOOL["function"]["name"],
    "description": WEATHER_TOOL["function"]["description"],
    "input_schema": WEATHER_TOOL["function"]["parameters"],
}


def connect(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.root, api_key="any", max_retries=0, timeout=120)


def options(server: Server, messages: list, **rest: object) -> dict:
    return {
        "model": server.model,
        "messages": messages,
        "max_tokens": paths.MAX_TOKENS,
        "extra_body": {"temperature": 0},
    } | rest


def ask(server: Server, messages: list, **rest: object) -> anthropic.types.Message:
    return connect(server).messages.create(**options(server, messages, **rest))


def user(content: object) -> dict:
    return {"role": "user", "content": content}


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def plain(server: Server) -> None:
    answer = ask(server, [user(paths.QUESTION)])
    paths.check("Paris" in text_of(answer), answer)
    paths.check(answer.usage.output_tokens > 0 and answer._request_id, answer)
    told = ask(server, [user(paths.QUESTION)], system="You are brief.")
    counted = connect(server).messages.count_tokens(
        model=server.model, messages=[user(paths.QUESTION)], system="You are brief."
    )
    total = told.usage.input_tokens + (told.usage.cache_read_input_tokens or 0)
    paths.check(counted.input_tokens == total, (counted, told.usage))


def streamed(server: Server) -> None:
    with connect(server).messages.stream(**options(server, [user(paths.QUESTION)])) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    paths.check("Paris" in text and text == text_of(final), final)
    paths.check(final.stop_reason in ("end_turn", "max_tokens") and final.usage.output_tokens > 0, final)


def structured(server: Server) -> None:
    answer = connect(server).messages.parse(
        **options(server, [user(paths.QUESTION)], max_tokens=100), output_format=Capital
    )
    paths.check(isinstance(answer.parsed_output, Capital), answer)


def tools(server: Server) -> None:
    """Forced calls, whole and streamed, and the history with their results as the client writes it."""
    history: list = [user(WEATHER_QUESTION)]
    forced = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": TOOL["name"]}, "max_tokens": 200}
    message = ask(server, history, **forced)
    calls = [block for block in message.content if block.type == "tool_use"]
    paths.check(calls and calls[0].input["city"] in ("Paris", "Rome"), message)
    paths.check(message.stop_reason == "tool_use", message)
    with connect(server).messages.stream(**options(server, history, **forced)) as stream:
        final = stream.get_final_message()
    found = [block.input for block in final.content if block.type == "tool_use"]
    paths.check(found == [call.input for call in calls], final)
    for turn in (message, final):
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "18 degrees, sun"}
            for block in turn.content
            if block.type == "tool_use"
        ]
        answered = [*history, {"role": "assistant", "content": turn.content}, user(results)]
        nothing = {"type": "none"}
        paths.check(ask(server, answered, tools=[TOOL], tool_choice=nothing).content, answered)
        paths.check(ask(server, answered, tools=[TOOL]).stop_reason, answered)


def second_turn(server: Server) -> None:
    """An answer as the client holds it and as it dumps it, and asked on."""
    first = ask(server, [user(paths.QUESTION)])
    for turn in (first.content, first.to_dict()["content"], first.model_dump()["content"]):
        history = [user(paths.QUESTION), {"role": "assistant", "content": turn}, user(paths.FOLLOW_UP)]
        paths.check(text_of(ask(server, history)), history)


def overflow(server: Server) -> str:
    def call() -> None:
        try:
            ask(server, [user(paths.LONG_PROMPT)])
        except anthropic.BadRequestError as error:
            paths.check("prompt is too long" in str(error), error)
            raise

    return paths.expect_overflow(call, anthropic.BadRequestError)


def cancel(server: Server) -> None:
    endless = options(server, [user(paths.STORY)], max_tokens=paths.ENDLESS_TOKENS)
    with connect(server).messages.create(**endless, stream=True) as stream:
        for number, _ in enumerate(stream):
            if number == 3:
                break
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
