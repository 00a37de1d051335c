"""A gateway that dies: workers forget what it had asked for, and its clients go on at another one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from diptych.client import AsyncClient, Completion
from tests.end_to_end.tiny_model import CONTEXT
from tests.faults.armory import kill
from tests.faults.asks import ASKS, TIMEOUT_S, ask, check_same, prompt_of
from tests.faults.conftest import Breakable
from tests.faults.second_gateway import second_gateway

CANCELLED_WITHIN_S = 1.0
RESUMABLE = ["greedy", "seeded", "penalties", "logprobs", "rules", "grammar", "json"]


def test_streams_go_on_at_another_gateway_where_they_stopped(laptop: Breakable, tiny: Path) -> None:
    expected = ask(laptop.address, RESUMABLE)
    with second_gateway(laptop.stack, tiny) as second:
        laptop.armory.arm("decode.step", "freeze", after=12)  # nearly all have begun, and none has ended
        with ThreadPoolExecutor(1) as other:
            asked = other.submit(asyncio.run, resumed([second.address, laptop.address]))
            decode = laptop.armory.wait_taken("decode.step")
            time.sleep(0.1)  # what was computed is with the clients
            kill(second.pid)
            os.kill(decode, signal.SIGCONT)
            answers, pieces = asked.result()
    check_same(expected, answers)
    # Who had nothing yet (a grammar that was still being compiled) asked again from the beginning.
    assert sum(len(one) > 1 for one in pieces.values()) >= 4, f"few were interrupted: {pieces}"
    laptop.stack.wait_idle()


async def resumed(addresses: list[str]) -> tuple[dict[str, Completion], dict[str, list[str]]]:
    """The answers, and from which requests their pieces came."""

    async def one(client: AsyncClient, name: str) -> tuple[Completion, list[str]]:
        stream = client.stream(prompt_of(name), timeout_s=TIMEOUT_S, resume=True, **ASKS[name])
        async with stream:
            ids = [chunk.request_id async for chunk in stream if chunk.request_id]
            return stream.received.completion(), ids

    async with AsyncClient(addresses) as client:
        found = await asyncio.gather(*(one(client, name) for name in RESUMABLE))
    answers = dict(zip(RESUMABLE, (answer for answer, _ in found), strict=True))
    return answers, dict(zip(RESUMABLE, (ids for _, ids in found), strict=True))


def test_workers_drop_what_a_dead_gateway_asked_for(laptop: Breakable, tiny: Path) -> None:
    steps = "diptych_engine_step_tokens_total"
    with second_gateway(laptop.stack, tiny) as second:
        before = laptop.stack.metric("decode", steps)
        asyncio.run(left_alone(second.address, second.pid))
        laptop.stack.wait_idle(CANCELLED_WITHIN_S)
    assert laptop.stack.metric("decode", steps) - before < CONTEXT / 2


async def left_alone(address: str, pid: int) -> None:
    """One long stream whose gateway is killed at its first token."""
    async with AsyncClient(address, retries=0) as client:
        options = {"ignore_eos": True, "temperature": 0.0}
        stream = client.stream(prompt_of("greedy"), timeout_s=TIMEOUT_S, **options)  # type: ignore[arg-type]
        async with stream:
            await anext(stream)
            kill(pid)
