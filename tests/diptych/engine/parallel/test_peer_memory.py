"""The exchange through peers' memory, and through the host's, with threads for ranks and no GPU.

Memory that all ranks reach is one tensor here, and meetings are barriers. tests/gpu/test_parallel.py has the
real ones.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from diptych.engine.parallel import peer_memory_communicator
from diptych.engine.parallel.communicator import Communicator
from diptych.engine.parallel.host_copies import HostCopies
from diptych.engine.parallel.peer_memory_communicator import (
    SLOT_BYTES,
    PeerMemoryCommunicator,
    over_peer_memory,
)
from tests.diptych.engine.parallel.exchange_process import exchange
from tests.diptych.engine.parallel.thread_ranks import Meeting, ThreadCommunicator

RANKS = 3


class Reachable:
    """Slots that all ranks reach, as the handle of torch's symmetric memory has them."""

    def __init__(self) -> None:
        self.slots = torch.zeros(RANKS, SLOT_BYTES, dtype=torch.uint8)
        self._barriers = [threading.Barrier(RANKS, timeout=60) for _ in range(2)]
        self.skips = False

    def get_buffer(self, rank: int, sizes: object, dtype: torch.dtype) -> torch.Tensor:
        return self.slots[rank]

    def barrier(self, channel: int) -> None:
        if not self.skips:
            self._barriers[channel].wait()


def test_small_tensors_come_by_the_slots_and_others_by_the_library() -> None:
    reachable, meeting = Reachable(), Meeting(RANKS)
    ends = [
        PeerMemoryCommunicator(ThreadCommunicator(meeting, rank), reachable.slots[rank], reachable)
        for rank in range(RANKS)
    ]
    with ThreadPoolExecutor(RANKS) as threads:
        list(threads.map(exchange, ends))
        assert reachable.slots.any()
        large = [torch.full((SLOT_BYTES + 1,), rank, dtype=torch.uint8) for rank in range(RANKS)]
        before = reachable.slots.clone()
        found = list(threads.map(lambda end, own: end.all_gather(own), ends, large))
    assert all(torch.equal(one, torch.stack(large)) for one in found)
    assert torch.equal(reachable.slots, before)


def test_ranks_that_do_not_meet_read_other_numbers() -> None:
    """The control: a rank that does not wait reads a slot before it is written."""
    reachable, meeting = Reachable(), Meeting(RANKS)
    reachable.skips = True
    end = PeerMemoryCommunicator(ThreadCommunicator(meeting, 0), reachable.slots[0], reachable)
    with pytest.raises(AssertionError):
        exchange(end)


@pytest.mark.parametrize("broken", [None, 1])
def test_all_ranks_go_by_the_library_where_one_has_no_slots(
    broken: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reachable, meeting = Reachable(), Meeting(RANKS)

    def open_slots(inner: Communicator, *_: object) -> tuple[torch.Tensor, Reachable]:
        if inner.rank == broken:
            raise RuntimeError("no memory for slots")
        return reachable.slots[inner.rank], reachable

    monkeypatch.setattr(peer_memory_communicator, "_reaches_all", lambda *_: True)
    monkeypatch.setattr(peer_memory_communicator, "open_slots", open_slots)
    ends = [ThreadCommunicator(meeting, rank) for rank in range(RANKS)]
    store, device = HashStore(), torch.device("cpu")
    with ThreadPoolExecutor(RANKS) as threads:
        found = list(threads.map(lambda end: over_peer_memory(end, store, "test", device), ends))
    assert [isinstance(one, PeerMemoryCommunicator) for one in found] == [broken is None] * RANKS


def test_copies_through_the_host_bring_the_numbers_of_all() -> None:
    meeting = Meeting(RANKS)
    ends = [HostCopies(ThreadCommunicator(meeting, rank), torch.device("cpu")) for rank in range(RANKS)]
    assert not any(end.on_device for end in ends)
    with ThreadPoolExecutor(RANKS) as threads:
        list(threads.map(exchange, ends))
