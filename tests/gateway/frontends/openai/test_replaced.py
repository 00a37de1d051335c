"""A gateway whose ports are taken over, and clients that reuse their connections."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.model.served_model import ServedModel
from tests.gateway.frontends.openai.test_routes import gateway_api, ids_of
from tests.gateway.scripted_workers import answering


async def test_it_waits_for_the_next_request_of_a_client_whose_stream_it_has_ended(
    bundled: ServedModel, redis_url: str
) -> None:
    body = json.dumps({"model": bundled.card.name, "prompt": "x", "stream": True, "max_tokens": 100})
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    slow = answering(ids_of(bundled) * 5, pause_s=0.02)
    settings = {"reuse_port": True, "lame_duck": 0.0, "shutdown_timeout": 20.0}
    async with gateway_api(bundled, redis_url, slow, **settings) as (stack, _, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http_port)
        writer.write(request)
        assert b"close" not in await reader.readuntil(b"\r\n\r\n")
        drain = asyncio.ensure_future(stack.gateway.drain())
        await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
        writer.write(request)
        assert b"Connection: close" in await reader.readuntil(b"\r\n\r\n")
        assert not drain.done()
        assert (await reader.read()).endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
        await asyncio.wait_for(drain, 10)
        writer.close()


async def test_it_waits_for_the_rest_of_a_request(bundled: ServedModel, redis_url: str) -> None:
    body = json.dumps({"model": bundled.card.name, "prompt": "x"}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    settings: dict[str, Any] = {"reuse_port": True, "lame_duck": 0.0, "shutdown_timeout": 20.0}
    async with gateway_api(bundled, redis_url, **settings) as (stack, _, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http_port)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:9])
        await asyncio.sleep(0.1)
        drain = asyncio.ensure_future(stack.gateway.drain())
        await asyncio.sleep(1)
        assert not drain.done()
        writer.write(body[9:])
        assert b"200 OK" in await reader.readline()
        await asyncio.wait_for(drain, 10)
        writer.close()


@pytest.mark.parametrize(("path", "grace_s"), [("/health", 60.0), ("/v1/models", 0.1)])
async def test_shutdown_waits_for_no_probe_and_not_beyond_the_grace(
    bundled: ServedModel,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    grace_s: float,
) -> None:
    monkeypatch.setattr("diptych.runtime.http_edge._NEXT_REQUEST_S", 60.0)
    settings: dict[str, Any] = {"reuse_port": True, "lame_duck": 0.0, "shutdown_timeout": grace_s}
    async with gateway_api(bundled, redis_url, **settings) as (stack, _, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http_port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert b"200" in await reader.readuntil(b"\r\n\r\n")
        await asyncio.wait_for(stack.gateway.drain(), 20)
        assert "outlived" not in caplog.text
        writer.close()
