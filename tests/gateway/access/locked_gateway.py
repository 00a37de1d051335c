"""Gateway that requires API keys, and calls to it with and without one."""

from __future__ import annotations

from typing import Any

import aiohttp
import grpc
import pytest

from gateway.model.served_model import ServedModel
from tests.gateway.access.keys import Keys
from tests.gateway.running_gateway import Stack, running
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering

OUTPUT = [10, 11, 12]


def serving(model: ServedModel, redis_url: str, keys: Keys, decode: ScriptedDecode | None = None) -> Any:
    decode = decode or ScriptedDecode(answering(OUTPUT))
    return running(model, redis_url, ScriptedPrefill(), decode, api_keys_file=keys.path)


async def failure(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def http(
    stack: Stack, path: str, key: str = "", body: dict[str, Any] | None = None
) -> tuple[int, str, dict[str, str]]:
    url = f"http://127.0.0.1:{stack.gateway.http_port}{path}"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    method = "GET" if body is None else "POST"
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, json=body, headers=headers) as answer,
    ):
        return answer.status, await answer.text(), dict(answer.headers)


def completion(stack: Stack, **fields: Any) -> dict[str, Any]:
    return {"model": stack.model.card.name, "prompt": "Hello", "max_tokens": 3, **fields}
