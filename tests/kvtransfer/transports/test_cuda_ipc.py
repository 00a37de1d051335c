"""Copies into a mapped pool: announced blocks must be there, and Stopped waits for the copies.

The pool is a memfd here. IPC handles, streams and the copy kernel are a GPU's and not tried here.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import threading
from collections import Counter

import pytest
import torch

from diptych.worker.v1 import work_pb2
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports import registry
from kvtransfer.transports.base import Locality, Welcome
from kvtransfer.transports.cuda_ipc import CudaIpcChannel
from kvtransfer.transports.cuda_mapping import CudaMapping
from kvtransfer.transports.ipc_receiver_by_rank import IpcByRankReceiver
from kvtransfer.transports.memory_mapping import ExportedPool, Flags, HostMapping
from tests.kvtransfer.conftest import LAYOUT, fill, pairs, pattern, sampled, until

REF = GrantRef(("r", 1), 2, 9)
CPU = torch.device("cpu")


def test_flag_counts_the_written_blocks_of_its_grant():
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


async def test_pushed_without_the_flag_fails_the_attempt(make_pair, times):
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
    """Mapping that copies and forgets the flag."""

    def start_copy(self, run, target, flag):
        return super().start_copy(run, target, Flags.create(64).word(run.ref, 0))


class Slow(HostMapping):
    """Mapping whose copies end only when the test lets them."""

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
async def test_stopped_waits_for_the_copy_in_flight(make_pair, why):
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


async def test_changed_bytes_in_the_pool_fail_the_attempt(make_pair, times):
    """A copy that went wrong: the digests are those of the pool's bytes, not of the bytes that were sent."""
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


async def test_failed_check_fails_the_attempt(make_pair, times, monkeypatch):
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


async def test_map_refuses_a_pool_of_another_kind(make_pair):
    pair = await make_pair("cuda_ipc")
    (receiver,) = pair.decode.server._handshake.transports
    assert isinstance(receiver, IpcByRankReceiver)
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
def test_transports_for_refuses_gpu_transports_on_the_cpu(flag):
    with pytest.raises(ValueError, match="GPU"):
        registry.transports_for(flag, CPU)


def test_transports_for_auto_prefers_the_fastest():
    assert registry.transports_for("auto", CPU) == ("shared_memory", "tcp")
    gpu = torch.device("cuda", 0)
    assert registry.transports_for("auto", gpu) == ("cuda_shared", "cuda_ipc", "tcp")
    assert registry.transports_for("cuda_ipc", gpu) == ("cuda_shared", "cuda_ipc")
    assert registry.transports_for("gloo", CPU) == ("gloo",)
    with pytest.raises(ValueError, match="shared_memory"):
        registry.transports_for("shared_memory", gpu)


async def test_a_cancelled_registration_gives_its_page_back(make_pair, monkeypatch):
    pair = await make_pair("cuda_ipc")
    (receiver,) = pair.decode.server._handshake.transports
    whole = receiver._whole
    token = whole.admit(WriterId("w", 3), os.getpid())
    welcome = Welcome("127.0.0.1:1", whole.endpoint, token, LAYOUT, pair.decode.memory.memory.num_blocks)
    begun, let, pages = threading.Event(), threading.Event(), []

    class Waiting(HostMapping):
        def register_flags(self, flags):
            pages.append(flags)
            begun.set()
            assert let.wait(10)

    opening = asyncio.create_task(CudaIpcChannel.open(welcome, Waiting("host")))
    await until(begun.is_set)
    opening.cancel()
    let.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await until(lambda: [page.fd for page in pages] == [-1])


async def handed_off(times, seed: int) -> None:
    """Make a pair, hand a prompt off and close both ends."""
    async with pairs() as make:
        pair = await make("cuda_ipc")
        granted = await pair.grant("r", 10)
        fill(granted, 10, seed)
        assert await (await pair.peer()).commit(granted, 10, sampled(1), times)
        await until(lambda: bool(pair.decode.ready))
        for place, block in enumerate(pair.decode.ready[0].block_ids):
            assert torch.equal(pair.decode.memory.memory.data[block], pattern(seed, place))
    os.close(pair.decode.memory.file())  # a pool's file is open as long as its process


def in_use() -> Counter[str]:
    """Return the kinds of open files and the names of threads, but those that event loops and gRPC make."""
    found = Counter(thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_"))
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            kind = re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{number}"))
            if kind not in ("anon_inode:[eventpoll]", "anon_inode:[eventfd]"):
                found[kind] += 1
    return found


async def test_close_leaves_no_file_or_thread_open(times):
    """The first handoff of a process opens what gRPC keeps, and pollers come with load: both are left out."""
    await handed_off(times, 3)
    gc.collect()
    before = in_use()
    await handed_off(times, 4)

    def settled() -> bool:
        gc.collect()
        return not in_use() - before  # a mapping is given back by a thread

    with contextlib.suppress(TimeoutError):
        await until(settled, 20)
    assert in_use() - before == Counter()
