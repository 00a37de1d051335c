"""Pushing into a mapped pool: what is announced must be there, and a promise waits for the copies.

The pool is a memfd here: IPC handles, streams and the copy kernel are the GPU's, and not tried by this.
"""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
import torch

from diptych.worker.v1 import work_pb2
from kvtransfer.protocol.messages import GrantRef
from kvtransfer.transports import registry
from kvtransfer.transports.base import Locality
from kvtransfer.transports.cuda_ipc import CudaIpcReceiver
from kvtransfer.transports.cuda_mapping import CudaMapping
from kvtransfer.transports.memory_mapping import ExportedPool, Flags, HostMapping
from tests.kvtransfer.conftest import LAYOUT, fill, pattern, sampled, until

REF = GrantRef(("r", 1), 2, 9)
CPU = torch.device("cpu")


def test_a_flag_says_how_much_of_which_grant_is_written():
    ours = Flags.create(4)
    theirs = Flags.open(ours.fd, 4)
    assert not ours.written(REF, 1)
    theirs.word(REF, 3).set()
    assert ours.written(REF, 3)
    assert not ours.written(REF, 4)
    assert not ours.written(REF._replace(generation=8), 1), "an earlier grant of the slot"
    assert not ours.written(REF._replace(generation=10), 1), "a later grant of the slot"
    assert not ours.written(REF._replace(slot=1), 1)
    with pytest.raises(ValueError, match="small"):
        Flags.open(ours.fd, 5000)
    theirs.close()
    ours.close()


async def test_blocks_announced_before_they_are_written_are_not_believed(make_pair, times):
    pair = await make_pair("cuda_ipc")
    granted = await pair.grant("r", 10)
    peer = await pair.peer()
    fill(granted, 10, 1)
    peer._queue._channel._mapping = Silent("host")
    committing = asyncio.create_task(peer.commit(granted, 10, sampled(1), times))
    await until(lambda: bool(pair.decode.failed))
    assert pair.decode.failed[0][:2] == (("r", 1), work_pb2.FAILURE_REASON_KV_TRANSFER_FAILED)
    await committing
    await until(pair.decode.settled)
    assert pair.decode.ready == []


class Silent(HostMapping):
    """Copies, and forgets the flag."""

    def start_copy(self, run, target, flag):
        return super().start_copy(run, target, Flags.create(64).word(run.ref, 0))


class Slow(HostMapping):
    """Does not end a copy before it is let."""

    def __init__(self) -> None:
        super().__init__("host")
        self.begun, self.let = threading.Event(), threading.Event()

    def start_copy(self, run, target, flag):
        copy = super().start_copy(run, target, flag)

        def finish() -> list[bytes]:
            self.begun.set()
            assert self.let.wait(10)
            return copy()

        return finish


@pytest.mark.parametrize("why", ["cancelled", "link lost"])
async def test_no_promise_to_stop_while_a_copy_is_under_way(make_pair, why):
    pair = await make_pair("cuda_ipc")
    granted = await pair.grant("r", 10)
    peer = await pair.peer()
    fill(granted, 10, 1)
    port = peer._queue._channel._mapping = Slow()
    await peer.push(granted, 8)
    await until(port.begun.is_set)
    if why == "cancelled":
        pair.decode.server.cancel(("r", 1))
        await until(lambda: pair.prefill.aborted == [("r", 1)])
    else:
        (writer,) = pair.decode.server._writers._known.values()
        writer.link.close()
        await until(lambda: bool(pair.prefill.lost))
    await peer.stop(granted)
    await asyncio.sleep(0.3)
    assert pair.decode.pool.quarantined() == 3, "the copy may still write"
    assert pair.prefill.scratch.available() == 13, "and still reads"
    port.let.set()
    await until(pair.decode.settled)
    assert pair.prefill.scratch.available() == 16


async def test_what_changed_in_the_pool_is_noticed(make_pair, times):
    """As by a copy that went wrong: the digests are those of the pool's bytes, not of what was sent."""
    pair = await make_pair("cuda_ipc")
    granted = await pair.grant("r", 10)
    peer = await pair.peer()
    fill(granted, 10, 1)

    class Wrong(HostMapping):
        def start_copy(self, run, target, flag):
            copy = super().start_copy(run, target, flag)

            def finish() -> list[bytes]:
                digests = copy()
                target.data[run.target_ids[0]].view(-1)[3] += 1
                return digests

            return finish

    peer._queue._channel._mapping = Wrong("host")
    await peer.commit(granted, 10, sampled(1), times)
    await until(lambda: bool(pair.decode.failed))
    assert pair.decode.failed[0][1] == work_pb2.FAILURE_REASON_KV_TRANSFER_FAILED
    await until(pair.decode.settled)


async def test_blocks_that_cannot_be_checked_are_not_used(make_pair, times, monkeypatch):
    pair = await make_pair("cuda_ipc")
    granted = await pair.grant("r", 10)
    peer = await pair.peer()

    def unreadable(*arguments: object) -> list[bytes]:
        raise RuntimeError("an illegal memory access was encountered")

    (receiver,) = pair.decode.server._handshake.transports
    monkeypatch.setattr(receiver._mapping, "digests", unreadable)
    fill(granted, 10, 1)
    await peer.commit(granted, 10, sampled(1), times)
    await until(lambda: bool(pair.decode.failed))
    assert pair.decode.failed[0][1] == work_pb2.FAILURE_REASON_KV_TRANSFER_FAILED
    await until(pair.decode.settled)


async def test_a_pool_of_another_kind_is_refused(make_pair):
    pair = await make_pair("cuda_ipc")
    (receiver,) = pair.decode.server._handshake.transports
    assert isinstance(receiver, CudaIpcReceiver)
    assert receiver.unreachable_reason(Locality("elsewhere")) == "on another host"
    assert "GPU" in (HostMapping("here").unreachable_reason(Locality("here", "GPU-1"), in_place=False) or "")
    assert HostMapping("here").unreachable_reason(Locality("here"), in_place=False) is None
    cuda = CudaMapping(torch.device("cuda", 0), "here")
    assert cuda.unreachable_reason(Locality("elsewhere", "GPU-1"), in_place=False) == "on another host"
    assert "GPU" in (cuda.unreachable_reason(Locality("here"), in_place=False) or "")
    assert cuda.unreachable_reason(Locality("here", "GPU-1"), in_place=False) is None
    with pytest.raises(ValueError, match="not on a GPU"):
        cuda.map(ExportedPool(b"memfd", []), LAYOUT, 4)
    with pytest.raises(ValueError, match="not in host memory"):
        HostMapping("here").map(ExportedPool(b"cuda" + bytes(72), []), LAYOUT, 4)


@pytest.mark.parametrize("flag", ["cuda_ipc", "nccl"])
def test_a_cpu_worker_is_told_that_it_has_no_gpu(flag):
    with pytest.raises(ValueError, match="GPU"):
        registry.transports_for(flag, CPU)


def test_auto_takes_what_is_fastest():
    assert registry.transports_for("auto", CPU) == ("shared_memory", "tcp")
    gpu = torch.device("cuda", 0)
    assert registry.transports_for("auto", gpu) == ("cuda_shared", "cuda_ipc", "tcp")
    assert registry.transports_for("cuda_ipc", gpu) == ("cuda_shared", "cuda_ipc")
    assert registry.transports_for("gloo", CPU) == ("gloo",)
    with pytest.raises(ValueError, match="shared_memory"):
        registry.transports_for("shared_memory", gpu)


async def test_nothing_is_left_open(make_pair, times):
    before = len(os.listdir("/proc/self/fd"))
    pair = await make_pair("cuda_ipc")
    granted = await pair.grant("r", 10)
    fill(granted, 10, 4)
    assert await (await pair.peer()).commit(granted, 10, sampled(1), times)
    await until(lambda: bool(pair.decode.ready))
    for place, block in enumerate(pair.decode.ready[0].block_ids):
        assert torch.equal(pair.decode.memory.memory.data[block], pattern(4, place))
    await pair.prefill.client.close()
    await pair.decode.server.close()
    await pair.decode.grpc.stop(None)
    assert len(os.listdir("/proc/self/fd")) <= before + 3, "the pool's file, and gRPC's own"
