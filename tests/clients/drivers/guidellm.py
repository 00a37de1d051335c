"""Driver of guidellm's OpenAI backend, as its workers use it.

Its command line needs torch, which is not installed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import client_paths as paths
import httpx
from client_paths import NotOfferedError, Server
from guidellm.backends import OpenAIHTTPBackend
from guidellm.schemas import GenerationRequest, GenerationResponse, RequestInfo, UsageMetrics
from guidellm.schemas.backends import OpenAIHTTPBackendArgs

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TOKENS = 24


def request(prompt: str, tokens: int = TOKENS) -> GenerationRequest:
    return GenerationRequest(
        columns={"text_column": [prompt]}, output_metrics=UsageMetrics(text_tokens=tokens)
    )


async def ask(
    server: Server,
    asked: GenerationRequest,
    *,
    stream: bool,
    form: str = CHAT,
    history: Any = None,
    stop: Callable[[RequestInfo], bool] = lambda info: False,
) -> GenerationResponse | None:
    """Return the backend's last response to `asked`; `stop` ends the reading early."""
    arguments = OpenAIHTTPBackendArgs(
        target=server.root, model=server.model, request_format=form, stream=stream
    )
    backend, last = OpenAIHTTPBackend(arguments), None
    await backend.process_startup()
    try:
        await backend.validate()
        responses = backend.resolve(asked, RequestInfo(), history)
        async for response, info in responses:
            last = response or last
            if stop(info):
                break
        await responses.aclose()
    finally:
        await backend.process_shutdown()
    return last


def check_benchmark(server: Server, *, stream: bool) -> None:
    """Check that both forms of request give as many tokens as the benchmark asks for."""
    for form in (CHAT, COMPLETION):
        response = asyncio.run(ask(server, request(paths.QUESTION), stream=stream, form=form))
        paths.check(response and response.text, response)
        paths.check(response.output_metrics.text_tokens == TOKENS, response.output_metrics)


def plain(server: Server) -> None:
    check_benchmark(server, stream=False)


def streamed(server: Server) -> None:
    check_benchmark(server, stream=True)


def structured(server: Server) -> None:
    raise NotOfferedError("guidellm asks for no structured output")


def tools(server: Server) -> None:
    """A turn that expects a call, as guidellm's tool benchmarks send it."""
    function = {
        "name": "get_weather",
        "description": "Return the current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
    asked = request("What is the weather in Paris?", 100)
    asked.columns["tools_column"] = [[{"type": "function", "function": function}]]
    asked.turn_type = "client_tool_call"
    response = asyncio.run(ask(server, asked, stream=True))
    paths.check(response and response.tool_calls, response)


def second_turn(server: Server) -> None:
    first = request(paths.QUESTION)

    async def both() -> GenerationResponse | None:
        answer = await ask(server, first, stream=True)
        return await ask(server, request(paths.FOLLOW_UP), stream=True, history=[(first, answer)])

    response = asyncio.run(both())
    paths.check(response and response.text, response)


def overflow(server: Server) -> str:
    return paths.expect_overflow(
        lambda: asyncio.run(ask(server, request(paths.LONG_PROMPT), stream=False)), httpx.HTTPStatusError
    )


def cancel(server: Server) -> None:
    def begun(info: RequestInfo) -> bool:
        return info.timings.first_token_iteration is not None

    asyncio.run(ask(server, request(paths.STORY, paths.ENDLESS_TOKENS), stream=True, stop=begun))
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
