"""Driver of outlines, with its models for OpenAI's API and for vLLM's."""

from __future__ import annotations

from typing import Any, Literal

import client_paths as paths
import openai
import outlines
from client_paths import NotOfferedError, Server
from outlines.inputs import Chat
from outlines.types import JsonSchema, Regex
from typed_answer import Capital

KNOBS: dict[str, Any] = {"max_tokens": 150, "temperature": 0}


def models(server: Server) -> list[Any]:
    client = openai.OpenAI(base_url=server.url, api_key="any", max_retries=0, timeout=120)
    return [outlines.from_openai(client, server.model), outlines.from_vllm(client, server.model)]


def plain(server: Server) -> None:
    for model in models(server):
        answer = model(paths.QUESTION, **KNOBS)
        paths.check("Paris" in answer, answer)


def streamed(server: Server) -> None:
    for model in models(server):
        pieces = list(model.stream(paths.QUESTION, **KNOBS))
        paths.check("Paris" in "".join(pieces) and len(pieces) > 1, pieces)


def structured(server: Server) -> None:
    """Types that both models have, and a choice, an expression and a schema that vLLM's has."""
    for model in models(server):
        Capital.model_validate_json(model(paths.QUESTION, Capital, **KNOBS))
    vllm = models(server)[1]
    paths.check(vllm(paths.QUESTION, Literal["Paris", "Rome"], **KNOBS) in ("Paris", "Rome"), "no choice")
    paths.check(vllm("Pick a number.", Regex(r"\d{3}"), **KNOBS).isdecimal(), "no match")
    schema = JsonSchema(
        {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    )
    paths.check('"n"' in vllm("Pick a number.", schema, **KNOBS), "no object")


def tools(server: Server) -> None:
    raise NotOfferedError("outlines sends no tools")


def second_turn(server: Server) -> None:
    for model in models(server):
        chat = Chat([{"role": "user", "content": paths.QUESTION}])
        chat.add_assistant_message(model(chat, **KNOBS))
        chat.add_user_message(paths.FOLLOW_UP)
        paths.check(model(chat, **KNOBS), chat)


def overflow(server: Server) -> str:
    for model in models(server):
        name = paths.expect_overflow(
            lambda model=model: model(paths.LONG_PROMPT, **KNOBS),
            openai.BadRequestError,
            outlines.exceptions.OutlinesError,
        )
    return name


def cancel(server: Server) -> None:
    for model in models(server):
        stream = model.stream(paths.STORY, **KNOBS | {"max_tokens": paths.ENDLESS_TOKENS})
        for _ in range(3):
            next(stream)
        stream.close()
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
