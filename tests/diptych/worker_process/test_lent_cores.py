"""Decode yields cores to prompts that queue, and to nothing else; the tokens are the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from diptych.engine.shared_cores import SharedCores
from prefill_worker.request import State
from tests.diptych.worker_process.both_workers import House, greedy, house
from tests.diptych.worker_process.scripted_gateway import Gateway, work
from tests.kvtransfer.conftest import until

PROMPT = (5, 9, 2)
TOKENS = 30


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[SharedCores]:
    """Record every yield of cores."""
    seen: list[SharedCores] = []
    yield_cores = SharedCores.yield_

    def counting(share: SharedCores) -> None:
        seen.append(share)
        yield_cores(share)

    monkeypatch.setattr(SharedCores, "yield_", counting)
    return seen


async def streamed(made: House, name: str) -> tuple[int, ...]:
    gateway = Gateway(made)
    heard = gateway.start(made.decodes[0], made.prefills[0], work((name, 1), PROMPT, TOKENS))
    await heard.ended.wait()
    assert await made.empty() == []
    await gateway.close()
    return tuple(heard.tokens)


@contextlib.contextmanager
def prompts_waiting(share: SharedCores) -> Iterator[None]:
    share.backlog.set(0.0)
    yield
    share.backlog.set(None)


async def test_decode_yields_cores_between_steps_while_prompts_wait(rests: list[SharedCores]) -> None:
    async with house("shared_memory", stretch=1.5, prefills=2) as made:
        decode, _, other_prefill = made.shares
        assert await streamed(made, "alone") == greedy(PROMPT, TOKENS)
        alone = rests.count(decode)
        with prompts_waiting(other_prefill):
            assert await streamed(made, "beside") == greedy(PROMPT, TOKENS)
        beside = rests.count(decode) - alone
    assert alone < TOKENS / 2, "between steps its core stays its own"
    assert beside >= TOKENS - 3, "after each step but the last"


async def test_decode_without_pacing_does_not_yield(rests: list[SharedCores]) -> None:
    async with house("shared_memory", stretch=1.0, prefills=2) as made:
        decode, _, other_prefill = made.shares
        with prompts_waiting(other_prefill):
            assert await streamed(made, "beside") == greedy(PROMPT, TOKENS)
        assert rests.count(decode) < TOKENS / 2


async def test_prefill_publishes_a_backlog_beyond_its_step() -> None:
    async with house("shared_memory", stretch=1.0, chunk=8) as made:
        decode, _ = made.shares
        gateway, heard_waiting = Gateway(made), False
        long = tuple(range(2, 50))
        heard = gateway.start(made.decodes[0], made.prefills[0], work(("long", 1), long, 2))
        while not heard.ended.is_set():
            heard_waiting = heard_waiting or decode.backlog.of_others_s() is not None
            await asyncio.sleep(0)
        assert heard_waiting
        assert await made.empty() == []
        assert decode.backlog.of_others_s() is None
        assert decode.num_idle() == 1
        await gateway.close()


async def test_the_backlog_includes_the_wait_in_the_gateways_queue() -> None:
    async with house("shared_memory", stretch=1.0, chunk=8) as made:
        decode, _ = made.shares
        gateway, prompt = Gateway(made), tuple(range(2, 50))
        for number, seconds in enumerate((0, 4)):
            message = work((f"prompt {number}", 1), prompt, 2)
            message.waited.FromSeconds(seconds)
            gateway.start(made.decodes[0], made.prefills[0], message)
        heard: set[float | None] = set()
        while not all(one.ended.is_set() for one in gateway.heard.values()):
            heard.add(decode.backlog.of_others_s())
            await asyncio.sleep(0)
        assert max(waited for waited in heard if waited is not None) >= 4
        assert await made.empty() == []
        await gateway.close()


async def test_prompts_that_wait_for_blocks_are_no_backlog() -> None:
    """Yielding to it would delay the blocks that it waits for, and leave the cores idle."""
    async with house("shared_memory", decodes=2, stretch=1.0, chunk=8) as made:
        full, other = made.decodes
        gateway, prefill = Gateway(made), made.prefills[0]
        taken = full.pool.allocate(full.pool.available())
        message = work(("no blocks", 1), PROMPT, 2)
        message.waited.FromSeconds(4)
        blocked = gateway.start(full, prefill, message)
        await until(lambda: prefill.loop.requests[("no blocks", 1)].state is State.ASKED)
        await asyncio.sleep(0.2)
        heard: set[float | None] = set()
        computed = gateway.start(other, prefill, work(("blocks", 1), tuple(range(2, 50)), 2))
        while not computed.ended.is_set():
            heard.add(made.shares[1].backlog.of_others_s())
            await asyncio.sleep(0)
        assert max(waited for waited in heard if waited is not None) < 2
        full.pool.release(taken)
        full.handoff.blocks_freed()
        await blocked.ended.wait()
        assert await made.empty() == []
        await gateway.close()


async def test_a_prompt_waits_until_its_first_step() -> None:
    """A prompt that is being computed does not wait, however long it is."""
    async with house("shared_memory", stretch=1.0) as made:
        gateway = Gateway(made)
        gateway.start(made.decodes[0], made.prefills[0], work(("r", 1), PROMPT, 2))
        request = made.prefills[0].loop.requests[("r", 1)]
        came = request.entered[State.QUEUED]
        assert request.waited_s(came + 3) == pytest.approx(3)
        request.begin(came + 1)
        request.begin(came + 2)
        assert request.waited_s(came + 3) == pytest.approx(1)
        await gateway.heard[("r", 1)].ended.wait()
        assert await made.empty() == []
        await gateway.close()


async def test_a_closed_worker_yields_its_cores_and_has_no_backlog() -> None:
    """Else the backlog would stay until a successor has work, and decode steps would wait for nothing."""
    async with house("shared_memory", stretch=1.0, chunk=8) as made:
        decode, prefill = made.shares
        gateway = Gateway(made)
        gateway.start(made.decodes[0], made.prefills[0], work(("stream", 1), PROMPT, 200))
        await until(lambda: made.decodes[0].loop.steps > 0)
        gateway.start(made.decodes[0], made.prefills[0], work(("long", 1), tuple(range(2, 50)), 2))
        async with asyncio.timeout(10):
            while decode.backlog.of_others_s() is None:  # noqa: ASYNC110 - for a few steps of a millisecond
                await asyncio.sleep(0)
    assert decode.backlog.of_others_s() is None
    assert (decode.num_idle(), prefill.num_idle()) == (1, 1)
    await gateway.close()
