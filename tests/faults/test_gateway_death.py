"""A gateway that dies: workers forget what it had asked for, and its clients go on at another one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from diptych.client import AsyncClient, Completion
from tests.end_to_end.tiny_model import CONTEXT
from tests.faults.conftest import Breakable
from tests.faults.failpoints import kill
from tests.faults.requests import ASKS, TIMEOUT_S, Asks, check_same, prompt_of
from tests.faults.second_gateway import second_gateway

CANCELLED_WITHIN_S = 1.0
TRIES = 4  # in one of them the machine gives all processes their time
LONG = {
    name: {**ASKS[name], "max_tokens": 300} for name in ("greedy", "seeded", "penalties", "logprobs", "rules")
}
SHORT = {name: ASKS[name] for name in ("grammar", "json")}


def test_streams_go_on_at_another_gateway_where_they_stopped(laptop: Breakable, tiny: Path) -> None:
    asks = {**LONG, **SHORT}
    expected, _ = asyncio.run(streamed([laptop.address], asks))
    with second_gateway(laptop.stack, tiny) as second:

        def break_it() -> None:
            """Nothing more is computed, what was is with the clients, and then their gateway is gone."""
            laptop.armory.arm("decode.step", "freeze")
            decode = laptop.armory.wait_taken("decode.step")
            time.sleep(0.1)
            kill(second.pid)
            os.kill(decode, signal.SIGCONT)

        addresses = [second.address, laptop.address]
        answers, requests = asyncio.run(streamed(addresses, asks, when_begun=break_it))
    check_same(expected, answers)
    assert all(len(requests[name]) > 1 for name in LONG), f"not all were interrupted: {requests}"
    laptop.stack.wait_idle()


async def streamed(
    addresses: list[str], asks: Asks, *, when_begun: Callable[[], None] = lambda: None
) -> tuple[dict[str, Completion], dict[str, list[str]]]:
    """The answers, and the requests that their pieces came from. Something is done once LONG have begun."""
    begun: set[str] = set()
    requests: dict[str, list[str]] = {name: [] for name in asks}
    acting: list[asyncio.Task[None]] = []

    async def one(client: AsyncClient, name: str) -> Completion:
        stream = client.stream(prompt_of(name), timeout_s=TIMEOUT_S, resume=True, **asks[name])
        async with stream:
            async for chunk in stream:
                if chunk.request_id:
                    requests[name].append(chunk.request_id)
                begun.add(name)
                if begun >= LONG.keys() and not acting:
                    acting.append(asyncio.create_task(asyncio.to_thread(when_begun)))
            return stream.received.completion()

    async with AsyncClient(addresses) as client:
        answers = dict(zip(asks, await asyncio.gather(*(one(client, name) for name in asks)), strict=True))
    await asyncio.gather(*acting)
    return answers, requests


def test_workers_drop_what_a_dead_gateway_asked_for(laptop: Breakable, tiny: Path) -> None:
    # On a loaded machine a fast stream may be half made before anyone sees the death: one clean try is
    # enough, since workers that drop nothing would make every stream whole.
    tries: list[tuple[float, float]] = []
    while not any(took_s <= CANCELLED_WITHIN_S and tokens < CONTEXT / 2 for took_s, tokens in tries):
        assert len(tries) < TRIES, f"(seconds until idle, tokens made) of each try: {tries}"
        steps = "diptych_engine_step_tokens_total"
        with second_gateway(laptop.stack, tiny) as second:
            before = laptop.stack.metric("decode", steps)
            killed_at = asyncio.run(left_alone(second.address, second.pid))
            laptop.stack.wait_idle()
            took_s = time.monotonic() - killed_at
        tries.append((took_s, laptop.stack.metric("decode", steps) - before))


async def left_alone(address: str, pid: int) -> float:
    """One long stream whose gateway is killed at its first token; when that was."""
    async with AsyncClient(address, retries=0) as client:
        options = {"ignore_eos": True, "temperature": 0.0}
        stream = client.stream(prompt_of("greedy"), timeout_s=TIMEOUT_S, **options)  # type: ignore[arg-type]
        async with stream:
            await anext(stream)
            kill(pid)
            return time.monotonic()
