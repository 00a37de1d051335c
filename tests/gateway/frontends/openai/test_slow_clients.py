"""Clients that send slowly, or do not read: cut off, and nothing of theirs stays."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from diptych.runtime.http_edge import HttpEdge
from diptych.v1 import inference_pb2 as pb
from gateway.frontends.openai.completions_answer import CompletionsAnswer
from gateway.frontends.openai.completions_request import read_completions
from gateway.frontends.openai.http_call import EventStream
from gateway.model.served_model import ServedModel
from tests.gateway.frontends.openai.test_answers import ENVELOPE, TOKENS
from tests.gateway.frontends.openai.test_routes import gateway_api, post

MEGABYTE = pb.GenerateResponse(outputs=[pb.OutputDelta(text="x" * (1 << 20))])


async def test_a_reader_that_stalls_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.runtime.http_edge.STALL_S", 0.3)
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def endless(request: web.BaseRequest) -> web.StreamResponse:
        asked = read_completions({"model": "m", "prompt": "x", "stream": True})
        answer = CompletionsAnswer(asked, **ENVELOPE, **TOKENS)
        stream = EventStream(request, answer)
        stream.name("r")
        sent = 0
        try:
            while True:
                await stream.send(0, MEGABYTE)
                sent += 1
        except asyncio.CancelledError:
            ended.set_result(sent)
            raise

    http = await HttpEdge.start("127.0.0.1", 0, registry=CollectorRegistry(), ready=lambda: True, api=endless)
    client = socket.create_connection(("127.0.0.1", http.port))
    client.sendall(b"GET /v1/x HTTP/1.1\r\nHost: x\r\n\r\n")
    # What the kernel's buffers hold goes out; then it is waited for the client, and not for ever.
    assert await asyncio.wait_for(ended, 10) < 64
    client.close()
    await http.close()


async def test_a_body_that_does_not_come_is_not_waited_for(
    bundled: ServedModel, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.frontends.openai.json_request._BODY_S", 0.3)
    async with gateway_api(bundled, redis_url) as (stack, _, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http_port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 5)
        writer.close()
        body: Any = {"model": bundled.card.name, "prompt": "x"}
        assert (await post(stack, "/v1/completions", body))[0] == 200


async def test_an_answer_is_not_begun_for_a_client_that_left_early(
    bundled: ServedModel, redis_url: str
) -> None:
    async with gateway_api(bundled, redis_url) as (stack, _, decode):
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http_port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
            await writer.drain()
            writer.close()
        body: Any = {"model": bundled.card.name, "prompt": "x"}
        assert (await post(stack, "/v1/completions", body))[0] == 200
        await stack.until_idle()
        assert len(await decode.wait_for("attach")) == 1
