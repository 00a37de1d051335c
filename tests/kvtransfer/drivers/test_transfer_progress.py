"""Blocks that are sent and never arrive, while the control stream lives."""

from __future__ import annotations

import asyncio

import pytest
import torch

from diptych.worker.v1 import work_pb2
from kvtransfer.protocol.lease import TransferProgress
from tests.kvtransfer.conftest import LAYOUT, fill, pattern, read_whole, sampled, until

STALL_S = 0.6


@pytest.mark.parametrize("copying", ["tcp", "gloo", "2 ranks to 3"])
async def test_silent_data_connection_ends_the_link_and_the_next_works(make_pair, copying, times):
    pair = await make_pair(copying, stall_s=STALL_S)
    granted = await pair.grant("r", 10)
    peer = await pair.peer()
    (receiver,) = pair.decode.server._handshake.transports
    whole = getattr(receiver, "_whole", receiver)
    (data,) = {**receiver._listener._sockets, **whole._listener._sockets}.values()
    data._transport.pause_reading()
    fill(granted, 10, 1)
    committing = asyncio.create_task(peer.commit(granted, 10, sampled(1), times))
    await until(lambda: bool(pair.decode.failed), 10.0)
    assert pair.decode.failed[0][:2] == (("r", 1), work_pb2.FAILURE_REASON_PEER_LOST)
    await committing
    await until(pair.decode.settled)
    await until(lambda: peer.linked)
    again = await pair.grant("again", 10)
    fill(again, 10, 2)
    assert await (await pair.peer()).commit(again, 10, sampled(1), times)
    await until(lambda: len(pair.decode.ready) == 1)
    for place, block in enumerate(pair.decode.ready[0].block_ids):
        assert torch.equal(read_whole(pair.decode.memory.memory, block), pattern(2, place))
    assert len(pair.decode.ready[0].block_ids) == LAYOUT.blocks_for(10)


@pytest.mark.parametrize("copying", ["tcp", "gloo"])
async def test_idle_link_stays(make_pair, copying, times):
    pair = await make_pair(copying, stall_s=STALL_S)
    for request in ("first", "second"):
        granted = await pair.grant(request, 10)
        fill(granted, 10, 1)
        assert await (await pair.peer()).commit(granted, 10, sampled(1), times)
        await until(lambda: bool(pair.decode.ready))
        pair.decode.pool.release(pair.decode.ready.pop().block_ids)
        if request == "first":
            await asyncio.sleep(2 * STALL_S)
    assert pair.prefill.lost == []


def test_stalled_needs_silence_with_blocks_in_flight():
    progress = TransferProgress(0.0, 0.25, stall_s=2.0)
    now = 0.0

    def after(seconds: float, sent: int, acknowledged: int) -> bool:
        nonlocal now
        stalled = False
        for _ in range(int(seconds / 0.25)):
            now += 0.25
            stalled = progress.stalled(now, sent, acknowledged)
        return stalled

    assert not after(10.0, 0, 0)
    assert not after(1.75, 5, 0)
    assert not after(1.75, 5, 1), "one more arrived"
    assert not after(10.0, 5, 5), "nothing is in flight"
    assert not after(1.75, 6, 5)
    assert after(0.5, 6, 5)


def test_stalled_discounts_a_stall_of_this_process():
    progress = TransferProgress(0.0, 0.25, stall_s=2.0)
    assert not progress.stalled(0.25, 3, 0)
    assert not progress.stalled(60.0, 3, 0)
    assert not progress.stalled(60.25, 3, 0)
    assert progress.stalled(61.9, 3, 0) is False
