"""Requests that no worker can take, answered by another server: a real one, of aiohttp."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from gateway.model.served_model import ServedModel
from tests.gateway.running_gateway import Stack, running
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering

EVENTS = [b'data: {"n": 1}\n\n', b"data: [DONE]\n\n"]


@contextlib.asynccontextmanager
async def upstream(status: int = 200) -> AsyncIterator[tuple[str, list[tuple[str, dict[str, Any], str]]]]:
    """Yield the URL of a server, and what it is asked: path, body and authorization."""
    asked: list[tuple[str, dict[str, Any], str]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked.append((request.path, body, request.headers.get("authorization", "")))
        if status != 200:
            return web.Response(status=status)
        if not body.get("stream"):
            return web.json_response({"model": body["model"], "choices": []})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in EVENTS:
            await response.write(event)
            await asyncio.sleep(0.05)
        return response

    app = web.Application()
    app.router.add_post("/base/v1/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}/base/v1", asked
    finally:
        await runner.cleanup()


async def post(stack: Stack, path: str, **body: Any) -> tuple[int, str | None, bytes]:
    url = f"http://127.0.0.1:{stack.gateway.http_port}{path}"
    headers = {"authorization": "Bearer the-clients-own"}
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
        return answer.status, answer.headers.get("x-diptych-fallback"), await answer.read()


def settings(url: str, tmp_path: Path) -> dict[str, Any]:
    key = tmp_path / "key"
    key.write_text("theirs\n")
    return {
        "fallback_url": url,
        "fallback_model": "big",
        "fallback_key_file": key,
        "worker_wait_timeout": 0.0,
    }


async def test_refused_request_is_answered_elsewhere_and_says_so(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    async with upstream() as (url, asked), running(bundled, redis_url, **settings(url, tmp_path)) as stack:
        name = bundled.card.name
        status, mark, body = await post(stack, "/v1/completions", model=name, prompt="Hi", top_k=3)
        assert (status, mark, json.loads(body)["model"]) == (200, "127.0.0.1", "big")
        path, sent, key = asked[0]
        assert (path, key) == ("/base/v1/completions", "Bearer theirs")
        assert sent == {"model": "big", "prompt": "Hi", "top_k": 3}
        messages = [{"role": "user", "content": "Hi"}]
        streamed = await post(stack, "/v1/chat/completions", model=name, messages=messages, stream=True)
        assert streamed == (200, "127.0.0.1", b"".join(EVENTS))
        value = stack.registry.get_sample_value("diptych_fallback_answers_total", {"status": "200"})
        assert value == 2


async def test_what_is_wrong_or_can_be_served_stays_here(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    workers = ScriptedPrefill(), ScriptedDecode(answering([11, 12]))
    async with (
        upstream() as (url, asked),
        running(bundled, redis_url, *workers, **settings(url, tmp_path)) as stack,
    ):
        name = bundled.card.name
        assert (await post(stack, "/v1/completions", model=name, prompt="Hi", top_p=7))[:2] == (400, None)
        assert (await post(stack, "/v1/completions", model="none", prompt="Hi"))[:2] == (404, None)
        assert (await post(stack, "/v1/completions", model=name, prompt="Hi"))[:2] == (200, None)
        assert asked == []


async def test_server_that_refuses_or_is_away_leaves_the_error_of_here(
    bundled: ServedModel, redis_url: str, tmp_path: Path
) -> None:
    async with upstream(429) as (url, asked):
        for there in (url, "http://127.0.0.1:1/v1"):
            async with running(bundled, redis_url, **settings(there, tmp_path)) as stack:
                status, mark, body = await post(
                    stack, "/v1/completions", model=bundled.card.name, prompt="Hi"
                )
                assert (status, mark) == (503, None)
                assert json.loads(body)["error"]["code"] == "no_ready_worker"
        assert len(asked) == 1
