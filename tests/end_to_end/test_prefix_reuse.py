"""A shared prefix is computed once, whichever gateway the requests come through."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from diptych.client import AsyncClient, Chunk
from tests.end_to_end import reference
from tests.end_to_end.http_requests import collect
from tests.end_to_end.stack import Stack

PREFIX = 480


def prompt(family: int, tail: int) -> list[int]:
    """`PREFIX` tokens shared by the family, then a few of its own."""
    text = reference.prompts()[-1]
    return [*text[family * 7 : family * 7 + PREFIX], *text[2500 + tail * 11 : 2500 + tail * 11 + 8]]


async def first_token(address: str, ids: list[int], salt: str) -> tuple[float, Chunk]:
    """Seconds to the first token as the client sees it, and the stream's last message."""
    async with AsyncClient(address) as client:
        await client.model()  # connects
        started = time.monotonic()
        first = 0.0
        chunks = []
        options = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, "cache_salt": salt}
        async for chunk in client.stream(ids, **options):  # type: ignore[arg-type]
            first = first or time.monotonic() - started
            chunks.append(chunk)
        return first, chunks[-1]


@pytest.fixture(scope="module")
def other(bundled: Stack) -> Iterator[str]:
    """Another gateway process of the same system, which has seen no request."""
    account = bundled.account
    read, write = os.pipe()
    env = {**os.environ, "DIPTYCH_REDIS_URL": account["redis_url"], "DIPTYCH_SECRET": account["secret"]}
    command = [
        sys.executable,
        "-m",
        "gateway",
        "--grpc-port",
        "0",
        "--http-port",
        "0",
        "--ready-fd",
        str(write),
    ]
    process = subprocess.Popen(command, env=env, pass_fds=[write])
    os.close(write)
    try:
        with os.fdopen(read) as ready:
            port = json.loads(ready.readline())["grpc_port"]
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        assert process.wait(15) == 0


@pytest.mark.parametrize("through_second_gateway", [False, True])
def test_a_second_request_with_the_prefix_is_cached_and_quick(
    bundled: Stack, other: str, through_second_gateway: bool
) -> None:
    cold, warm = [], []
    for family in range(2):
        salt = f"reuse {family} {through_second_gateway}"  # other tests ask such prompts, too
        seconds, last = asyncio.run(first_token(bundled.address, prompt(family, 0), salt))
        assert last.usage is not None
        assert last.usage.cached_prompt_tokens == 0
        cold.append(seconds)
        address = other if through_second_gateway else bundled.address
        seconds, last = asyncio.run(first_token(address, prompt(family, 1), salt))
        assert last.usage is not None
        assert last.usage.cached_prompt_tokens == PREFIX // 16 * 16
        warm.append(seconds)
    assert min(warm) < min(cold) / 3, f"cold {cold}, warm {warm}"


def test_another_salt_shares_nothing(bundled: Stack) -> None:
    async def ask(address: str) -> list[int]:
        async with AsyncClient(address) as client:
            cached = []
            for salt in ("a", "b", "a"):
                chunks = await collect(client, prompt(0, 0), max_tokens=1, temperature=0.0, cache_salt=salt)
                assert chunks[-1].usage is not None
                cached.append(chunks[-1].usage.cached_prompt_tokens)
            return cached

    cached = asyncio.run(ask(bundled.address))
    assert cached[:2] == [0, 0]
    assert cached[2] > PREFIX / 2
