"""Groups that compute in each other's memories, rank by rank: who may map them, and what proves their end.

Memories are files of this host here. IPC handles, and kernels in flight when a process dies, are a GPU's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.engine.parallel.kv_routes import Holders
from kvtransfer.protocol.lease import LeaseTimes
from kvtransfer.protocol.messages import WriterId
from kvtransfer.transports import registry
from kvtransfer.transports.base import CPU, KVHolder, Locality, ReceiverHooks, host_id
from kvtransfer.transports.in_place_by_rank import InPlaceByRankReceiver
from kvtransfer.transports.memory_mapping import HostMapping
from kvtransfer.transports.shared_memory import SharedMemoryReceiver
from tests.kvtransfer.conftest import LAYOUT, fill, pattern, read_whole, sampled, until
from tests.kvtransfer.thread_ranks import ThreadWriters, own_pool, spread_over_threads
from tests.kvtransfer.transports.test_by_rank import ONE, THREE, TWO, WRITER, dealt
from tests.kvtransfer.transports.test_ipc_by_rank import Sources, sources

__all__ = ["sources"]


class Target:
    """A decode worker of two ranks, and what its transport has reported."""

    def __init__(self, ranks: contextlib.ExitStack, devices: tuple[str, ...] = ("", "")) -> None:
        pool = own_pool(LAYOUT, 6, TWO[0][0])
        ranks.callback(os.close, pool.file())
        ranks.enter_context(spread_over_threads(pool.memory, TWO))
        pool.memory.spread.devices = devices  # type: ignore[union-attr]
        self.dead: list[WriterId] = []
        hooks = ReceiverHooks(
            dead=self.dead.append,
            resolve=lambda *_: None,
            destinations=lambda *_: None,
            arrived=lambda *_: None,
            corrupt=lambda *_: None,
        )
        made = registry.make_receiver("cuda_shared", pool, "127.0.0.1", hooks)
        assert isinstance(made, InPlaceByRankReceiver)
        self.receiver = made

    def admit(self, pids: list[int]) -> list[KVHolder]:
        return list(self.receiver.admit_holders(WRITER, TWO, pids))


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    with contextlib.ExitStack() as ranks:
        made = Target(ranks)
        await made.receiver.start()
        yield made
        await made.receiver.close()


@pytest.mark.parametrize(
    ("holders", "pids", "devices", "why"),
    [
        (TWO, [1, 2], ["", ""], None),
        (THREE, [1, 2, 3], ["", "", ""], "other shares"),
        (ONE, [1], [""], "other shares"),
        (dealt((0, 2), (2, 3)), [1, 2], ["", ""], "other shares"),
        (TWO, [1, 2], ["GPU-1", ""], "other GPUs"),
        (TWO, [1, 2], [], "other GPUs"),
        (TWO, [1], ["", ""], "other hosts"),
        ((), [1, 2], [], "one memory"),
    ],
)
def test_groups_of_equal_shares_on_the_same_cards_are_reached(
    holders: Holders, pids: list[int], devices: list[str], why: str | None
) -> None:
    with contextlib.ExitStack() as ranks:
        found = Target(ranks).receiver.unreachable_holders(holders, pids, devices)
    assert found is None if why is None else why in (found or "")


def test_cards_are_compared_rank_by_rank() -> None:
    with contextlib.ExitStack() as ranks:
        receiver = Target(ranks, ("GPU-1", "GPU-2")).receiver
        assert receiver.unreachable_holders(TWO, [1, 2], ["GPU-1", "GPU-2"]) is None
        assert receiver.unreachable_holders(TWO, [1, 2], ["GPU-2", "GPU-1"]) == "ranks on other GPUs"
    assert receiver.unreachable_reason(Locality("elsewhere")) == "on another host"


def test_one_process_is_no_place_for_ranks_with_memories_of_their_own() -> None:
    pool = own_pool(LAYOUT, 6, ONE[0][0])
    hooks: Any = SimpleNamespace(dead=lambda writer: None)
    receiver = SharedMemoryReceiver("cuda_shared", pool, HostMapping(host_id()), hooks)
    assert receiver.unreachable_holders(TWO, [1, 2]) == "ranks with memories of their own"
    assert receiver.unreachable_holders(ONE, [1]) is None
    os.close(pool.file())


async def test_a_writer_is_dead_with_its_last_process(target: Target, sources: Sources) -> None:
    first, second = target.admit(sources.pids)
    assert await sources.register(0, first) == "mapped"
    assert not target.receiver.registered(WRITER)
    assert await sources.register(1, second) == "mapped"
    assert target.receiver.registered(WRITER)
    target.receiver.link_lost(WRITER)
    assert target.receiver.registered(WRITER), "a broken stream proves nothing"
    await sources.kill(1)
    await until(lambda: not target.receiver.registered(WRITER))
    assert not target.dead, "the other may still write to its rank's memory"
    await sources.kill(0)
    await until(lambda: target.dead == [WRITER])


async def test_a_fence_kills_the_process_at_every_rank(target: Target, sources: Sources) -> None:
    for number, holder in enumerate(target.admit(sources.pids)):
        assert await sources.register(number, holder) == "mapped"
    target.receiver.fence(WRITER)
    await until(lambda: target.dead == [WRITER])
    assert [process.wait(10) for process in sources.processes] == [-9, -9]


async def test_blocks_stay_in_quarantine_while_a_rank_may_write(
    make_pair: Callable[..., Any], times: Any
) -> None:
    pair = await make_pair("2 ranks in place")
    granted = await pair.grant("r", 10)
    peer = await pair.peer()
    assert peer.in_place
    assert pair.prefill.client._scratch is None, "no blocks of its own are needed"
    pair.decode.server.cancel(("r", 1))
    await until(lambda: pair.prefill.aborted == [("r", 1)])
    assert pair.decode.pool.quarantined() == 3
    fill(granted, 10, 1)
    await peer.stop(granted)
    await until(pair.decode.settled)


async def test_a_rank_that_cannot_map_makes_the_worker_copy(
    make_pair: Callable[..., Any], times: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The other ranks have registered by then; what they mapped they give back, and write to none of it."""
    pair = await make_pair("2 ranks in place or copied")
    mapping = ThreadWriters.map_pool

    async def fails(self: ThreadWriters, *arguments: Any) -> None:
        await mapping(self, *arguments)
        raise registry.TransportError("no peer access")

    monkeypatch.setattr(ThreadWriters, "map_pool", fails)
    granted = await pair.grant("r", 10)
    peer = await pair.peer()
    assert not peer.in_place
    assert "go in copies: no peer access" in caplog.text
    in_place, _ = pair.decode.server._handshake.transports
    assert isinstance(in_place, InPlaceByRankReceiver)
    in_place._writers._dead(WriterId("prefill", 11))  # those that had mapped it in place
    assert pair.decode.server.stats().grants == 1, "the others copy, and may still write"
    fill(granted, 10, 1)
    assert await peer.commit(granted, 10, sampled(1), times)
    await until(lambda: bool(pair.decode.ready))
    (ready,) = pair.decode.ready
    assert ready.transport == "cuda_ipc"
    for place, block in enumerate(ready.block_ids):
        assert torch.equal(read_whole(pair.decode.memory.memory, block), pattern(1, place))


async def copying_instead(pair: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Break the link of a writer in place, which cannot map memories once more and so comes back to copy."""

    async def fails(*arguments: Any) -> None:
        raise registry.TransportError("a rank does not answer")

    peer = await pair.peer()
    assert peer.in_place
    monkeypatch.setattr(ThreadWriters, "map_pool", fails)
    peer.unmap()
    await break_link(pair)
    await until(lambda: peer.linked and not peer.in_place)
    return peer


async def break_link(pair: Any) -> None:
    """End the one link from the decode worker's side."""
    lost = len(pair.prefill.lost)
    (writer,) = pair.decode.server._writers._known.values()
    writer.link.close()
    await until(lambda: len(pair.prefill.lost) > lost)


async def test_blocks_of_an_earlier_transport_wait_for_its_own_proof(
    make_pair: Callable[..., Any], times: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a data socket says nothing of a step that still writes to the mapped memories."""
    pair = await make_pair("2 ranks in place or by tcp", lease_times=LeaseTimes(relink_grace_s=60.0))
    granted = await pair.grant("r", 10)
    peer = await copying_instead(pair, monkeypatch)
    assert pair.decode.pool.quarantined() == 3
    copied = await pair.grant("q", 10)
    await break_link(pair)  # and with it the data socket: the proof of what was copied
    await until(lambda: pair.decode.pool.quarantined() <= 3 and pair.decode.server.stats().grants == 0)
    await until(lambda: peer.linked)
    assert pair.decode.pool.quarantined() == 3, "the step in place may still write"
    await peer.stop(copied)
    fill(granted, 10, 1)
    in_place, _ = pair.decode.server._handshake.transports
    in_place._writers._dead(WriterId("prefill", 11))
    await until(pair.decode.settled)
    assert peer.linked, "the proof of an earlier transport ends no link"


async def test_a_fence_reaches_earlier_transports(
    make_pair: Callable[..., Any], times: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that does not stop what it began in place is killed, and not only cut off from its socket."""
    pair = await make_pair("2 ranks in place or by tcp")
    await pair.grant("r", 10)
    await copying_instead(pair, monkeypatch)
    in_place, _ = pair.decode.server._handshake.transports
    fenced: list[WriterId] = []
    monkeypatch.setattr(in_place, "fence", fenced.append)  # the writer is this very process
    writers = pair.decode.server._writers
    writers.fence(WriterId("prefill", 11), "a test")
    assert fenced == [WriterId("prefill", 11)]
    assert pair.decode.pool.quarantined() == 3
    assert writers.is_fenced(WriterId("prefill", 11))
    in_place._writers._dead(WriterId("prefill", 11))
    await until(pair.decode.settled)


def test_a_domain_has_the_same_cards_and_shares() -> None:
    def domain(holders: Holders, *devices: str) -> str:
        ranks = ThreadWriters(holders)
        ranks.devices = list(devices)
        return registry.memory_domain(("cuda_shared", "tcp"), CPU, "w", ranks)

    known = domain(TWO, "GPU-1", "GPU-2")
    assert known == domain(TWO, "GPU-1", "GPU-2")
    others = {domain(TWO, "GPU-2", "GPU-1"), domain(THREE, "GPU-1", "GPU-2", "GPU-3"), domain(ONE, "GPU-1")}
    others.add(domain(dealt((0, 2), (2, 3)), "GPU-1", "GPU-2"))
    assert len(others) == 4
    assert known not in others
    assert registry.memory_domain(("tcp",), CPU, "w", ThreadWriters(TWO)) == "copies/w"


def test_transports_of_groups_begin_in_place() -> None:
    gpu = torch.device("cuda", 0)
    assert registry.transports_for("auto", gpu, apart=True) == ("cuda_shared", "cuda_ipc", "tcp")
    assert registry.transports_for("cuda_ipc", gpu, apart=True) == ("cuda_shared", "cuda_ipc")
    assert registry.transports_for("tcp", gpu, apart=True) == ("tcp",)
    with pytest.raises(registry.UnusableTransport, match="cuda_ipc and tcp do"):
        registry.transports_for("gloo", CPU, apart=True)
