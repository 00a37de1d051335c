"""Pulls: a prefill worker takes the prefix that only the decode worker has, and nothing else."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from kvtransfer.drivers.puller import OUTCOMES
from kvtransfer.protocol import pull_rates
from kvtransfer.transports import memory_mapping, pull_frames
from tests.kvtransfer.conftest import LAYOUT, fill, pattern, sampled, until

BLOCK = LAYOUT.block_size
KEYS = [bytes([i]) * 16 for i in range(32)]
PREFIX = 3


class Gate:
    """Stand-in for `fetch_block` at the decode worker: blocks pass one by one when they are let."""

    def __init__(self) -> None:
        self.waiting = 0
        self._let = asyncio.Semaphore(0)
        self._real = pull_frames.fetch_block

    async def fetch(self, *args):
        self.waiting += 1
        await self._let.acquire()
        self.waiting -= 1
        return await self._real(*args)

    def let(self, blocks: int = 100) -> None:
        for _ in range(blocks):
            self._let.release()


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    monkeypatch.setattr(pull_frames, "fetch_block", gate.fetch)
    return gate


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Let no pull be late unless its test makes it so: a starved machine would."""
    monkeypatch.setattr(pull_rates, "ASSUMED_DEADLINE_S", 20.0)


@pytest.fixture(params=["tcp", "gloo", "cuda_ipc"])
def pulling(request):
    """Return a transport that copies."""
    return request.param


@pytest.fixture(params=["tcp", "gloo"])
def framed(request):
    """Return a transport that pulls by frames."""
    return request.param


async def cached_pair(make_pair, transport, blocks=PREFIX, **options):
    """Return a pair whose decode worker alone has the blocks of KEYS[:blocks]."""
    pair = await make_pair(transport, **options)
    held = pair.decode.pool.allocate(blocks)
    parent = b""
    for place, (block, key) in enumerate(zip(held, KEYS, strict=False)):
        pair.decode.memory.memory.data[block] = pattern(1, place)
        pair.decode.pool.insert(block, key, parent)
        parent = key
    pair.decode.pool.release(held)
    pair.ends = []
    pair.prefill.client._on_pull_end = lambda outcome, blocks, seconds: pair.ends.append((outcome, blocks))
    return pair


def pulled(granted, count=PREFIX):
    """Return whether the first blocks hold what the decode worker has."""
    return all(
        torch.equal(granted.memory.data[granted.block_table[place]], pattern(1, place))
        for place in range(count)
    )


async def settled(pair):
    await until(pair.decode.settled)
    pair.prefill.scratch.invariants()
    assert pair.prefill.scratch.available() == pair.prefill.scratch.total


async def test_prefix_of_the_decode_worker_is_pulled(make_pair, pulling, times):
    pair = await cached_pair(make_pair, pulling)
    granted = await pair.grant("r", 14, KEYS[:3])
    assert (granted.computed_tokens, granted.cached_tokens) == (12, 12)
    assert pulled(granted)
    assert pair.ends == [("pulled", 3)]
    fill(granted, 14, 2)
    peer = await pair.peer()
    assert await peer.commit(granted, 14, sampled(1), times)
    assert times.cached_tokens == 12
    await until(lambda: len(pair.decode.ready) == 1)
    ready = pair.decode.ready[0]
    assert torch.equal(pair.decode.memory.memory.data[ready.block_ids[3]], pattern(2, 3))
    pair.decode.pool.release(ready.block_ids)
    await settled(pair)


async def test_pulled_blocks_serve_the_next_prompt(make_pair, pulling):
    pair = await cached_pair(make_pair, pulling)
    peer = await pair.peer()
    await peer.stop(await pair.grant("r", 14, KEYS[:3]))
    again = await pair.grant("s", 14, KEYS[:3])
    assert again.computed_tokens == 12
    assert pulled(again)
    assert pair.ends == [("pulled", 3)], "the second one needs none"
    await peer.stop(again)
    await settled(pair)


async def test_only_what_scratch_lacks_is_pulled(make_pair, pulling):
    pair = await cached_pair(make_pair, pulling, blocks=5)
    peer = await pair.peer()
    await peer.stop(await pair.grant("r", 3 * BLOCK, KEYS[:3]))
    granted = await pair.grant("s", 6 * BLOCK, KEYS[:6])
    assert granted.computed_tokens == 5 * BLOCK
    assert pulled(granted, 5)
    assert pair.ends == [("pulled", 2), ("pulled", 3)]


async def test_prompt_that_must_not_be_cached_leaves_nothing(make_pair, pulling):
    pair = await cached_pair(make_pair, pulling)
    peer = await pair.peer()
    key = pair.decode.expect("r", 14, KEYS[:3])
    granted = await peer.ask(key, 14, KEYS[:3], keep=False)
    assert granted.computed_tokens == 12
    await peer.stop(granted)
    assert not pair.prefill.client.cached_keys()
    await settled(pair)


async def test_damaged_block_is_computed_instead(make_pair, framed, monkeypatch):
    sent = 0

    def damage(payload):
        nonlocal sent
        sent += 1
        damaged = bytearray(payload)
        damaged[7] ^= sent == 2
        return memoryview(damaged)

    monkeypatch.setattr(pull_frames, "damage_payload", damage)
    pair = await cached_pair(make_pair, framed)
    granted = await pair.grant("r", 14, KEYS[:3])
    assert granted.computed_tokens == BLOCK
    assert pair.ends == [("partly", 1)]
    assert set(pair.prefill.client.cached_keys()) == set(KEYS[:1])


async def test_late_pull_is_computed_instead_and_touches_nothing_later(make_pair, framed, gate):
    pair = await cached_pair(make_pair, framed)
    pair.prefill.client.pull_rates.computed(1000, 0.1)
    granting = asyncio.create_task(pair.grant("r", 14, KEYS[:3]))
    await until(lambda: gate.waiting == 1)
    gate.let(1)
    granted = await granting
    assert granted.computed_tokens == BLOCK
    assert pair.ends == [("partly", 1)]
    fill(granted, 14, 9)
    gate.let()
    await asyncio.sleep(0.05)
    assert torch.equal(granted.memory.data[granted.block_table[1]], pattern(9, 1))
    await (await pair.peer()).stop(granted)
    await settled(pair)


async def test_pull_that_costs_more_than_computing_is_declined(make_pair, pulling):
    pair = await cached_pair(make_pair, pulling)
    rates = pair.prefill.client.pull_rates
    rates.computed(1000, 0.1)
    rates.pulled(1000, 0.5)
    granted = await pair.grant("r", 14, KEYS[:3])
    assert granted.computed_tokens == 0
    assert pair.ends == [("declined", 0)]


@pytest.mark.parametrize("how", ["decode cancels", "prefill cancels", "link breaks"])
async def test_end_in_the_middle_of_a_pull_returns_every_block(make_pair, framed, gate, how):
    pair = await cached_pair(make_pair, framed)
    peer = await pair.peer()
    asking = asyncio.create_task(pair.grant("r", 14, KEYS[:3]))
    await until(lambda: gate.waiting == 1)
    if how == "decode cancels":
        pair.decode.server.cancel(("r", 1))
        await until(lambda: pair.prefill.aborted == [("r", 1)])
    elif how == "link breaks":
        (writer,) = pair.decode.server._writers._known.values()
        writer.link.close()
        await until(lambda: [keys for _, keys in pair.prefill.lost] == [[("r", 1)]])
    if how == "link breaks":  # which cuts the pull
        await peer.stop(await asking)
    else:
        asking.cancel()  # as the prefill worker does
        with pytest.raises(asyncio.CancelledError):
            await asking
    await until(lambda: peer.linked)
    gate.let()
    await settled(pair)
    granted = await pair.grant("again", 14, KEYS[:3])
    assert granted.computed_tokens == 12
    assert pulled(granted)


async def test_revoked_grant_is_sent_no_more(make_pair, framed, gate):
    """The pins of a revoked grant are gone: its blocks may have another content by now."""
    pair = await cached_pair(make_pair, framed)
    asking = asyncio.create_task(pair.grant("r", 14, KEYS[:3]))
    await until(lambda: gate.waiting == 1)
    pair.decode.server.cancel(("r", 1))
    gate.let()
    granted = await asking
    assert granted.computed_tokens == 0
    await (await pair.peer()).stop(granted)
    await settled(pair)


@pytest.mark.parametrize("how", ["flush there", "flush here", "distrust there"])
async def test_event_between_start_and_entry_voids_the_pull(make_pair, framed, gate, how):
    pair = await cached_pair(make_pair, framed)
    asking = asyncio.create_task(pair.grant("r", 14, KEYS[:3]))
    await until(lambda: gate.waiting == 1)
    if how == "flush here":
        pair.prefill.client.flush_prefix_cache()
    else:
        scratch = pair.prefill.client._scratch
        before = scratch._epoch
        if how == "flush there":
            pair.decode.pool.clear_cache()
        else:
            pair.decode.pool.forget(KEYS[:1])
        await until(lambda: scratch._epoch > before)
    gate.let()
    granted = await asking
    await (await pair.peer()).stop(granted)
    assert not pair.prefill.client.cached_keys()
    await settled(pair)


@pytest.mark.parametrize("how", ["flush", "distrust"])
async def test_event_after_the_entry_removes_the_blocks(make_pair, pulling, how):
    pair = await cached_pair(make_pair, pulling)
    await (await pair.peer()).stop(await pair.grant("r", 14, KEYS[:3]))
    assert set(pair.prefill.client.cached_keys()) == set(KEYS[:3])
    if how == "flush":
        pair.decode.pool.clear_cache()
    else:
        pair.decode.pool.forget(KEYS[1:2])
    kept = set() if how == "flush" else set(KEYS[:1])
    await until(lambda: set(pair.prefill.client.cached_keys()) == kept)


async def test_event_while_the_link_is_broken_removes_the_blocks(make_pair, pulling):
    pair = await cached_pair(make_pair, pulling)
    peer = await pair.peer()
    await peer.stop(await pair.grant("r", 14, KEYS[:3]))
    (writer,) = pair.decode.server._writers._known.values()
    writer.link.close()
    pair.decode.server._writers.link_lost(writer, writer.link)
    pair.decode.pool.clear_cache()
    await until(lambda: not peer.linked)
    await until(lambda: peer.linked)
    assert not pair.prefill.client.cached_keys()


async def test_broken_channel_costs_the_pull_alone(make_pair, framed, gate, times):
    pair = await cached_pair(make_pair, framed)
    peer = await pair.peer()
    asking = asyncio.create_task(pair.grant("r", 14, KEYS[:3]))
    await until(lambda: gate.waiting == 1)
    gate.let(1)
    await until(lambda: gate.waiting == 1)
    (socket,) = pair.decode.server._pulls._listener._sockets.values()
    socket.end()
    granted = await asking
    assert peer.linked
    assert granted.computed_tokens in (0, BLOCK)
    gate.let()
    fill(granted, 14, 1)
    assert await peer.commit(granted, 14, sampled(1), times)
    await until(lambda: len(pair.decode.ready) == 1)
    pair.decode.pool.release(pair.decode.ready[0].block_ids)
    await settled(pair)


async def test_in_place_nothing_is_pulled(make_pair):
    pair = await cached_pair(make_pair, "shared_memory")
    granted = await pair.grant("r", 14, KEYS[:3])
    assert granted.computed_tokens == 12
    assert pair.ends == []


async def test_many_pulls_at_once_return_every_block(make_pair, pulling):
    pair = await cached_pair(make_pair, pulling, blocks=4, scratch_blocks=20)
    peer = await pair.peer()

    async def attempt(number: int) -> None:
        granted = await pair.grant(f"r{number}", 5 * BLOCK, KEYS[: 1 + number % 5])
        assert pulled(granted, granted.computed_tokens // BLOCK)
        await asyncio.sleep(0.001 * (number % 3))
        if number % 4 == 0:
            pair.prefill.client.flush_prefix_cache()
        await peer.stop(granted)

    await asyncio.gather(*(attempt(number) for number in range(40)))
    await settled(pair)
    assert {outcome for outcome, _ in pair.ends} <= set(OUTCOMES)


async def test_pins_of_a_mapped_pool_last_until_the_writer_has_stopped(make_pair):
    """A read that has begun cannot be called back: what it reads must not change."""
    pair = await cached_pair(make_pair, "cuda_ipc")
    granted = await pair.grant("r", 14, KEYS[:3])
    pair.decode.server.cancel(("r", 1))
    await until(lambda: pair.prefill.aborted == [("r", 1)])
    assert pair.decode.pool.quarantined() == 1
    assert pair.decode.pool.available() == 16 - 1 - PREFIX
    await (await pair.peer()).stop(granted)
    await settled(pair)


async def test_read_of_a_mapped_pool_is_waited_for(make_pair, monkeypatch):
    """Scratch that a copy may still write is not given to the next prompt."""
    begun, let = threading.Event(), threading.Event()
    real = memory_mapping.HostMapping.copy

    def copy(self, run, target):
        if target is not pair.decode.memory.memory and not begun.is_set():
            begun.set()
            let.wait(20)
        return real(self, run, target)

    pair = await cached_pair(make_pair, "cuda_ipc")
    monkeypatch.setattr(memory_mapping.HostMapping, "copy", copy)
    asking = asyncio.create_task(pair.grant("r", 14, KEYS[:3]))
    await until(begun.is_set)
    asking.cancel()
    await asyncio.sleep(0.05)
    assert not asking.done()
    assert pair.prefill.scratch.available() == 16 - 4
    assert pair.decode.server.stats().grants == 1
    let.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await settled(pair)


async def test_damaged_copy_of_a_mapped_pool_is_computed_instead(make_pair, monkeypatch):
    copied = 0

    def damage(payload):
        nonlocal copied
        copied += 1
        damaged = bytearray(payload)
        damaged[7] ^= copied == 2
        return memoryview(damaged)

    monkeypatch.setattr(memory_mapping, "damage_payload", damage)
    pair = await cached_pair(make_pair, "cuda_ipc")
    granted = await pair.grant("r", 14, KEYS[:3])
    assert granted.computed_tokens == BLOCK
    assert pair.ends == [("partly", 1)]
    await (await pair.peer()).stop(granted)
    await settled(pair)
