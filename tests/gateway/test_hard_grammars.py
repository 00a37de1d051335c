"""Requests with grammars that take long to compile, in a real gateway."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from diptych.v1 import inference_pb2 as pb
from gateway.model.served_model import ServedModel
from tests.gateway.access.keys import Keys, bearer
from tests.gateway.failing_calls import check_http, told
from tests.gateway.running_gateway import Stack, running
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering


def endless(number: int) -> dict[str, Any]:
    """Return a distinct schema that takes half a second to compile."""
    patterns = [{"type": "string", "pattern": f"a{{{n}}}.*b{number}"} for n in range(1, 30)]
    return {"allOf": patterns}


async def ask(stack: Stack, schema: dict[str, Any], timeout_ms: int = 60_000) -> tuple[int, str]:
    """Return the HTTP status and the error's code."""
    body = {"model": stack.model.card.name, "prompt": "Hello", "json_schema": schema}
    url = f"http://127.0.0.1:{stack.gateway.http_port}/v1/completions"
    headers = {"x-request-timeout-ms": str(timeout_ms)}
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
        return answer.status, check_http(answer.status, await answer.text(), answer.headers)["code"]


async def test_deadline_during_grammar_compilation_reaches_no_worker(
    bundled: ServedModel, redis_url: str
) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode(answering([10, 11]))
    async with running(bundled, redis_url, prefill, decode) as stack:
        slow = [asyncio.create_task(ask(stack, endless(number))) for number in range(4)]
        await asyncio.sleep(0.1)
        begun = time.monotonic()
        assert await ask(stack, {"type": "integer"}, 200) == (504, "deadline_exceeded")
        took = time.monotonic() - begun
        assert not slow[-1].done()
        assert took < 2
        assert {await task for task in slow} == {(400, "invalid_parameter")}
        await stack.until_idle()
    assert not [kind for kind, _ in (*prefill.sent, *decode.sent) if kind == "attach"]


async def test_dead_grammar_child_does_not_fail_the_request(bundled: ServedModel, redis_url: str) -> None:
    async def kill(stack: Stack) -> None:
        child = stack.core.request_parser._grammars.child
        while True:
            if child.process is not None:
                child.process.kill()
            await asyncio.sleep(0.001)

    workers = ScriptedPrefill(), ScriptedDecode(answering([10]))
    asked = pb.StructuredOutput(regex="[ab]")
    async with running(bundled, redis_url, *workers) as stack:
        killing = asyncio.create_task(kill(stack))
        assert await ask(stack, {"type": "integer"}) == (503, "grammar_not_checked")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stack.stub.Generate(stack.request(structured_output=asked))
        found = told(refused.value)
        assert (found.code, found.reason) == (grpc.StatusCode.UNAVAILABLE, "GRAMMAR_NOT_CHECKED")
        assert found.retry_s is not None
        killing.cancel()
        answer = await stack.stub.Generate(stack.request(structured_output=asked))
        assert answer.usage.completion_tokens == 1


async def test_request_is_charged_before_its_grammar_is_compiled(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    """Check the charge before the grammar: an exhausted key could else keep the child busy."""
    keys = Keys(tmp_path / "keys.jsonl")
    key = keys.add("flood", requests_per_minute=1)
    workers = ScriptedPrefill(), ScriptedDecode(answering([10]))
    async with running(bundled, redis_url, *workers, api_keys_file=keys.path) as stack:
        reasons = []
        for number in range(2):
            asked = pb.StructuredOutput(json_schema=json.dumps(endless(number)))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stack.stub.Generate(stack.request(structured_output=asked), metadata=bearer(key))
            reasons.append(told(refused.value).reason)
    assert reasons == ["INVALID_PARAMETER", "QUOTA_EXCEEDED"]
