"""Conformance of every transport, from the first ask to the last block returned."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
import uvloop

from diptych.worker.v1 import work_pb2
from kvtransfer.protocol.errors import AttemptOver, GrantDeniedError, HandoffDenied, PeerLost
from kvtransfer.protocol.lease import LeaseTimes
from tests.kvtransfer.conftest import (
    APART,
    IN_PLACE,
    INCARNATION,
    LAYOUT,
    fill,
    pairs,
    pattern,
    read_whole,
    sampled,
    until,
)

BLOCK = LAYOUT.block_size
KEYS = [bytes([i]) * 16 for i in range(32)]


@pytest.fixture(params=["shared_memory", "in_process", "tcp", "gloo", "cuda_ipc", *APART])
def transport(request: pytest.FixtureRequest) -> str:
    """Every transport; both ends are in this process."""
    return str(request.param)


async def handoff(pair, request, num_tokens, seed, times, keys=None):
    granted = await pair.grant(request, num_tokens, keys)
    peer = await pair.peer()
    fill(granted, num_tokens, seed)
    await peer.push(granted, num_tokens - 1)
    assert await peer.commit(granted, num_tokens, sampled(42), times)
    await until(lambda: any(r.key == granted.key for r in pair.decode.ready))
    return next(r for r in pair.decode.ready if r.key == granted.key)


@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 2])
async def test_commit_hands_off_the_blocks_as_written(make_pair, transport, times, num_tokens):
    pair = await make_pair(transport)
    # A pool that has been used, so that block tables are not in order.
    taken = pair.decode.pool.allocate(16)
    random.Random(num_tokens).shuffle(taken)
    pair.decode.pool.release(taken)
    ready = await handoff(pair, "r", num_tokens, 3, times)
    assert ready.num_tokens == num_tokens
    assert ready.first_tokens == sampled(42)
    assert ready.cached_tokens == 0
    assert ready.in_place == (transport in ("shared_memory", "in_process", *IN_PLACE))
    assert len(ready.block_ids) == LAYOUT.blocks_for(num_tokens)
    assert ready.times.prefill_steps == 3
    moved = 0 if ready.in_place else len(ready.block_ids) * LAYOUT.bytes_per_block
    assert ready.times.kv_bytes_transferred == moved
    assert ready.times.HasField("kv_receive")
    for place, block in enumerate(ready.block_ids):
        assert torch.equal(read_whole(pair.decode.memory.memory, block), pattern(3, place))
    pair.decode.pool.release(ready.block_ids)
    assert pair.decode.settled()
    assert pair.prefill.scratch.available() == 16


async def test_ask_skips_the_cached_prefix(make_pair, transport, times):
    pair = await make_pair(transport)
    first = await handoff(pair, "a", 10, 1, times, KEYS[:2])
    parent = b""
    for block, key in zip(first.block_ids, KEYS[:2], strict=False):
        assert pair.decode.pool.insert(block, key, parent)
        parent = key
    granted = await pair.grant("b", 14, KEYS[:3])
    assert granted.cached_tokens == 8
    assert granted.computed_tokens == 8
    fill(granted, 14, 2)
    assert await (await pair.peer()).commit(granted, 14, sampled(1), times)
    await until(lambda: len(pair.decode.ready) == 2)
    second = pair.decode.ready[1]
    assert second.cached_tokens == 8
    assert second.block_ids[:2] == first.block_ids[:2]
    expected = [pattern(1, 0), pattern(1, 1), pattern(2, 2), pattern(2, 3)]
    for block, wanted in zip(second.block_ids, expected, strict=True):
        assert torch.equal(read_whole(pair.decode.memory.memory, block), wanted)


async def test_ask_leaves_the_last_token_to_compute(make_pair, transport, times):
    pair = await make_pair(transport)
    first = await handoff(pair, "a", 8, 1, times, KEYS[:2])
    pair.decode.pool.insert(first.block_ids[0], KEYS[0], b"")
    pair.decode.pool.insert(first.block_ids[1], KEYS[1], KEYS[0])
    granted = await pair.grant("b", 8, KEYS[:2])
    assert granted.cached_tokens == 4


async def test_ask_before_attach_is_granted_after_it(make_pair, transport):
    pair = await make_pair(transport)
    peer = await pair.peer()
    asking = asyncio.create_task(peer.ask(("r", 1), 5, []))
    await asyncio.sleep(0.05)
    assert not asking.done()
    pair.decode.expect("r", 5)
    assert len((await asking).block_table) == 2


async def test_ask_without_attach_is_denied(make_pair, transport):
    pair = await make_pair(transport)
    with pytest.raises(GrantDeniedError) as refused:
        await (await pair.peer()).ask(("unattached", 1), 5, [])
    assert refused.value.failure.reason == work_pb2.FAILURE_REASON_PEER_LOST
    assert pair.decode.settled()


async def test_ask_beyond_the_pool_is_denied_at_once(make_pair, transport):
    pair = await make_pair(transport, scratch_blocks=64)
    with pytest.raises(GrantDeniedError) as refused:
        await pair.grant("r", 17 * BLOCK)
    assert refused.value.failure.reason == work_pb2.FAILURE_REASON_EXCEEDS_KV_CAPACITY
    assert [(key, reason) for key, reason, _ in pair.decode.failed] == [
        (("r", 1), work_pb2.FAILURE_REASON_EXCEEDS_KV_CAPACITY)
    ]


async def test_grant_leaves_a_spare_block_for_each_running_sequence(make_pair, transport):
    pair = await make_pair(transport)
    pair.decode.running = 2
    asking = asyncio.create_task(pair.grant("r", 15 * BLOCK))
    await until(lambda: pair.decode.server.stats().waiting_asks == 1)
    await asyncio.sleep(0.02)
    assert not asking.done()
    pair.decode.running = 1
    pair.decode.server.blocks_freed()
    await asking


@pytest.mark.parametrize("when", ["waiting", "granted", "pushed"])
async def test_cancel_returns_every_block(make_pair, transport, when):
    pair = await make_pair(transport)
    peer = await pair.peer()
    if when == "waiting":
        taken = pair.decode.pool.allocate(16)
        asking = asyncio.create_task(pair.grant("r", 10))
        await until(lambda: pair.decode.server.stats().waiting_asks == 1)
        pair.decode.server.cancel(("r", 1))
        with pytest.raises(AttemptOver):
            await asking
        pair.decode.pool.release(taken)
    else:
        granted = await pair.grant("r", 10)
        if when == "pushed":
            fill(granted, 10, 1)
            await peer.push(granted, 8)
        pair.decode.server.cancel(("r", 1))
        assert pair.decode.pool.quarantined() == 3
        await until(lambda: pair.prefill.aborted == [("r", 1)])
        await asyncio.sleep(0.02)
        assert pair.decode.pool.quarantined() == 3, "only the writer's word frees them"
        await peer.stop(granted)
    await until(pair.decode.settled)
    assert pair.decode.failed == []
    assert pair.decode.ready == []
    assert pair.prefill.scratch.available() == 16


async def test_commit_after_abort_counts_as_stopped(make_pair, transport, times):
    pair = await make_pair(transport)
    peer = await pair.peer()
    granted = await pair.grant("r", 10)
    pair.decode.server.cancel(("r", 1))
    await until(lambda: pair.prefill.aborted == [("r", 1)])
    assert not await peer.commit(granted, 10, sampled(1), times)
    await until(pair.decode.settled)
    assert pair.decode.ready == []


async def test_commit_that_crosses_an_abort_counts_as_stopped(make_pair, transport, times):
    pair = await make_pair(transport)
    peer = await pair.peer()
    granted = await pair.grant("r", 10)
    committing = asyncio.create_task(peer.commit(granted, 10, sampled(1), times))
    pair.decode.server.cancel(("r", 1))
    await committing
    await until(pair.decode.settled)
    assert pair.decode.ready == []


async def test_stop_with_a_failure_fails_the_attempt(make_pair, transport):
    pair = await make_pair(transport)
    peer = await pair.peer()
    granted = await pair.grant("r", 10)
    failure = work_pb2.Failure(reason=work_pb2.FAILURE_REASON_INTERNAL, message="not finite")
    await peer.stop(granted, failure)
    await until(pair.decode.settled)
    assert pair.decode.failed == [(("r", 1), work_pb2.FAILURE_REASON_INTERNAL, "not finite")]


async def test_cancelled_ask_is_withdrawn(make_pair, transport):
    pair = await make_pair(transport)
    taken = pair.decode.pool.allocate(16)
    asking = asyncio.create_task(pair.grant("r", 10))
    await until(lambda: pair.decode.server.stats().waiting_asks == 1)
    asking.cancel()
    await until(lambda: len(pair.decode.failed) == 1)
    pair.decode.pool.release(taken)
    assert pair.decode.settled()
    assert pair.prefill.scratch.available() == 16


async def test_abort_newest_grant_makes_room(make_pair, transport):
    pair = await make_pair(transport)
    peer = await pair.peer()
    old, new = await pair.grant("old", 10), await pair.grant("new", 10)
    assert pair.decode.server.abort_newest_grant() == new.key
    await until(lambda: pair.prefill.aborted == [new.key])
    await peer.stop(new)
    await until(lambda: pair.decode.pool.available() == 13)
    assert pair.decode.server.abort_newest_grant() == old.key
    assert pair.decode.server.abort_newest_grant() is None
    await peer.stop(old)
    await until(pair.decode.settled)
    assert pair.decode.failed == []


async def test_commit_of_a_wrong_token_count_fails_the_attempt(make_pair, transport, times):
    pair = await make_pair(transport)
    granted = await pair.grant("r", 10)
    fill(granted, 10, 1)
    await (await pair.peer()).commit(granted, 9, sampled(1), times)
    await until(pair.decode.settled)
    assert pair.decode.failed[0][1] == work_pb2.FAILURE_REASON_KV_TRANSFER_FAILED
    assert pair.decode.ready == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("model_digest", "other"), ("block_size", 8), ("kv_layout", "x"), ("hash_version", 2)],
)
async def test_link_to_an_incompatible_worker_names_the_field(make_pair, transport, field, value):
    pair = await make_pair(transport, **{field: value})
    with pytest.raises(HandoffDenied, match=field) as refused:
        await pair.peer()
    assert refused.value.failure.reason == work_pb2.FAILURE_REASON_INCOMPATIBLE


async def test_peer_of_another_incarnation_is_denied(make_pair, transport):
    pair = await make_pair(transport)
    with pytest.raises(HandoffDenied):
        await pair.prefill.client.peer(pair.decode.address, INCARNATION + 1)
    assert (await pair.peer()).linked


async def test_peer_of_an_earlier_incarnation_leaves_the_link_open(make_pair, transport, times):
    pair = await make_pair(transport)
    granted = await pair.grant("r", 10)
    with pytest.raises(HandoffDenied):
        await pair.prefill.client.peer(pair.decode.address, INCARNATION - 1)
    fill(granted, 10, 1)
    assert await (await pair.peer()).commit(granted, 10, sampled(1), times)
    await until(lambda: len(pair.decode.ready) == 1)
    assert pair.prefill.lost == []


async def test_relink_after_a_long_stop_sends_stopped(make_pair):
    """A prefill worker that has long left its blocks must be able to send Stopped, or it would be killed."""
    pair = await make_pair("shared_memory", lease_times=LeaseTimes(relink_grace_s=60.0))
    granted = await pair.grant("r", 10)
    peer, port = await pair.peer(), int(pair.decode.address.rpartition(":")[2])
    await pair.decode.grpc.stop(None)
    await until(lambda: [keys for _, keys in pair.prefill.lost] == [[("r", 1)]])
    await peer.stop(granted)
    await asyncio.sleep(2.0)
    assert pair.decode.pool.quarantined() == 3
    assert peer.memory is None, "a pool whose process may be dead is not kept for ever"
    await pair.decode.listen(port)
    await until(pair.decode.settled)
    assert len((await pair.grant("again", 10)).block_table) == 3


async def test_relink_after_a_broken_stream_sends_stopped(make_pair, transport):
    """A stream that breaks between two living processes costs the attempt, never a block or a process."""
    pair = await make_pair(transport, scratch_blocks=64)
    peer = await pair.peer()
    granted = await pair.grant("r", 10)
    waiting = asyncio.create_task(pair.grant("w", 60))
    await until(lambda: pair.decode.server.stats().waiting_asks == 1)
    (writer,) = pair.decode.server._writers._known.values()
    writer.link.close()
    await until(lambda: [keys for _, keys in pair.prefill.lost] == [[("r", 1)]])
    with pytest.raises(PeerLost):
        await waiting
    failed = {key for key, _, _ in pair.decode.failed}
    assert ("r", 1) in failed
    await until(lambda: peer.linked)
    await peer.stop(granted)
    pair.decode.server.cancel(("w", 1))
    await until(pair.decode.settled)
    assert pair.prefill.scratch.available() == 64
    assert (await pair.peer()) is peer
    assert len((await pair.grant("again", 10)).block_table) == 3


def test_handoff_works_on_uvloop(transport):
    async def scenario() -> None:
        async with pairs() as make:
            pair = await make(transport)
            ready = await handoff(pair, "r", 30, 3, work_pb2.PhaseTimes())
            for place, block in enumerate(ready.block_ids):
                assert torch.equal(read_whole(pair.decode.memory.memory, block), pattern(3, place))
            pair.decode.pool.release(ready.block_ids)
            granted = await pair.grant("lost", 10)
            (writer,) = pair.decode.server._writers._known.values()
            writer.link.close()
            await until(lambda: [keys for _, keys in pair.prefill.lost] == [[("lost", 1)]])
            await (await pair.peer()).stop(granted)
            await until(pair.decode.settled)

    uvloop.run(scenario())


async def test_many_attempts_at_once_return_every_block(make_pair, transport, times):
    pair = await make_pair(transport, blocks=8, scratch_blocks=8)
    peer = await pair.peer()
    rng = random.Random(5)

    async def attempt(number: int) -> None:
        num_tokens = rng.randint(1, 20)
        granted = await pair.grant(f"r{number}", num_tokens)
        fill(granted, num_tokens, number)
        await peer.push(granted, num_tokens // 2)
        await asyncio.sleep(0)
        if rng.random() < 0.3:
            pair.decode.server.cancel(granted.key)
        if rng.random() < 0.3:
            await peer.stop(granted)
        elif not await peer.commit(granted, num_tokens, sampled(number), times_of()):
            return

    def times_of() -> work_pb2.PhaseTimes:
        return work_pb2.PhaseTimes()

    async def decode() -> None:
        seen = 0
        while True:
            for ready in pair.decode.ready[seen:]:
                seen += 1
                number = ready.first_tokens[0].token_id
                for place, block in enumerate(ready.block_ids):
                    assert torch.equal(read_whole(pair.decode.memory.memory, block), pattern(number, place))
                pair.decode.pool.release(ready.block_ids)
                pair.decode.server.blocks_freed()
            await asyncio.sleep(0.001)

    decoding = asyncio.create_task(decode())
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for number in range(60):
            group.create_task(attempt(number))
    await until(pair.decode.settled)
    decoding.cancel()
    assert pair.prefill.scratch.available() == 8


async def test_aborted_writer_writes_nothing_after_stopped(make_pair, times, transport):
    """Writes of an aborted attempt go to quarantined blocks until it stops, and nowhere after that."""
    pair = await make_pair(transport)
    peer = await pair.peer()
    late = await pair.grant("late", 10)
    fill(late, 10, 1)
    await peer.push(late, 4)
    pair.decode.server.cancel(("late", 1))
    await until(lambda: pair.prefill.aborted == [("late", 1)])
    fill(late, 10, 2)
    await peer.push(late, 8)
    await peer.stop(late)
    await until(pair.decode.settled)
    ready = await handoff(pair, "next", 16 * BLOCK, 7, times)
    await peer.push(late, 10)
    await asyncio.sleep(0.05)
    for place, block in enumerate(ready.block_ids):
        assert torch.equal(read_whole(pair.decode.memory.memory, block), pattern(7, place))
