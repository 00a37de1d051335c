"""A shared prefix is computed once, whichever gateway the requests come through."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from diptych.client import AsyncClient, Chunk
from tests.end_to_end import reference
from tests.end_to_end.asking import collect
from tests.end_to_end.stack import Stack, running_stack

PREFIX = 1000


def prompt(family: int, tail: int) -> list[int]:
    """1,000 tokens shared by the family, then a few of its own."""
    text = reference.prompts()[-1]
    return [*text[family * 7 : family * 7 + PREFIX], *text[2500 + tail * 11 : 2500 + tail * 11 + 8]]


async def first_token(address: str, ids: list[int]) -> tuple[float, Chunk]:
    """Seconds to the first token as the client sees it, and the stream's last message."""
    async with AsyncClient(address) as client:
        await client.model()  # connects
        started = time.monotonic()
        first = 0.0
        chunks = []
        async for chunk in client.stream(ids, max_tokens=4, temperature=0.0, ignore_eos=True):
            first = first or time.monotonic() - started
            chunks.append(chunk)
        return first, chunks[-1]


@contextlib.contextmanager
def second_gateway(stack: Stack) -> Iterator[str]:
    """Another gateway process of the same system, which has seen no request."""
    account = stack.account
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
def test_a_second_request_with_the_prefix_is_cached_and_quick(through_second_gateway: bool) -> None:
    with running_stack("--dtype", "fp32") as stack, second_gateway(stack) as other:
        cold, warm = [], []
        asyncio.run(first_token(stack.address, prompt(9, 9)))  # connections between the workers are made
        for family in range(3):
            seconds, last = asyncio.run(first_token(stack.address, prompt(family, 0)))
            assert last.usage is not None
            assert last.usage.cached_prompt_tokens < PREFIX / 2
            cold.append(seconds)
            address = other if through_second_gateway else stack.address
            seconds, last = asyncio.run(first_token(address, prompt(family, 1)))
            assert last.usage is not None
            assert last.usage.cached_prompt_tokens == PREFIX // 16 * 16
            warm.append(seconds)
    assert statistics.median(warm) < statistics.median(cold) / 3, f"cold {cold}, warm {warm}"


def test_another_salt_shares_nothing() -> None:
    async def ask(address: str) -> list[int]:
        async with AsyncClient(address) as client:
            cached = []
            for salt in ("a", "b", "a"):
                chunks = await collect(client, prompt(0, 0), max_tokens=1, temperature=0.0, cache_salt=salt)
                assert chunks[-1].usage is not None
                cached.append(chunks[-1].usage.cached_prompt_tokens)
            return cached

    with running_stack("--dtype", "fp32") as stack:
        cached = asyncio.run(ask(stack.address))
    assert cached[:2] == [0, 0]
    assert cached[2] > PREFIX / 2
