"""Streams whose model is silent: head and comments meanwhile, over real sockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.model.served_model import ServedModel
from tests.gateway.frontends.openai.test_routes import TEXT, gateway_api, ids_of
from tests.gateway.scripted_workers import ScriptedDecode, answering

SILENCE_S = 0.2


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEAD_AFTER_S", "COMMENT_AFTER_S"):
        monkeypatch.setattr(f"gateway.frontends.openai.http_call.{name}", SILENCE_S)


async def nothing(decode: ScriptedDecode, work: Any) -> None:
    """Script of a decode worker that waits for the test."""


async def begin(
    stack: Any, body: dict[str, Any], header: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http_port)
    data = json.dumps({"model": stack.model.card.name, "stream": True, **body}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n%b\r\n" % (len(data), header)
    )
    writer.write(data)
    return reader, writer


async def test_head_and_comments_come_before_the_first_token(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url, nothing) as (stack, _, decode):
        reader, writer = await begin(stack, {"prompt": ["a", "b"]})
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"text/event-stream" in head
        for _ in range(3):
            assert b": waiting\n" in await asyncio.wait_for(reader.readuntil(b": waiting\n\n"), 10)
        writer.close()
        await decode.wait_for("cancel", 2)
        await stack.until_idle()


async def test_failure_after_the_head_is_an_error_event(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url, nothing) as (stack, _, _):
        reader, writer = await begin(stack, {"prompt": "a"}, b"x-request-timeout-ms: 1500\r\n")
        await asyncio.wait_for(reader.readuntil(b": waiting\n\n"), 10)
        rest = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 20)
        (event,) = [line for line in rest.splitlines() if line.startswith(b"data: ")]
        assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "deadline_exceeded"
        assert b"[DONE]" not in rest
        writer.close()


async def test_openai_client_of_little_patience_reads_past_the_comments(
    bundled: ServedModel, redis_url: str
) -> None:
    answer = answering(ids_of(bundled))

    async def late(decode: ScriptedDecode, work: Any) -> None:
        await asyncio.sleep(10 * SILENCE_S)
        await answer(decode, work)

    async with gateway_api(bundled, redis_url, late) as (_, client, _):
        patient = client.with_options(timeout=5 * SILENCE_S)  # between two bytes
        stream = await patient.completions.create(model=bundled.card.name, prompt="a", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT


async def test_refusal_before_admission_has_a_status_of_its_own(bundled: ServedModel, redis_url: str) -> None:
    async with gateway_api(bundled, redis_url, nothing) as (stack, _, _):
        reader, writer = await begin(stack, {"prompt": "a", "temperature": -1})
        assert b" 400 " in await asyncio.wait_for(reader.readline(), 10)
        writer.close()
