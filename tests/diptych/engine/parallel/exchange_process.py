"""Exchange tensors as one rank of a group: KIND RANK RANKS FD_OR_PORT; prints what went wrong."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch

from diptych.engine.backends.triton.cuda_graph import capture_for
from diptych.engine.parallel.communicator import Communicator
from diptych.engine.parallel.gloo_communicator import GlooCommunicator
from diptych.engine.parallel.host_copies import HostCopies
from diptych.engine.parallel.nccl_communicator import NcclCommunicator
from diptych.engine.parallel.peer_memory_communicator import PeerMemoryCommunicator, over_peer_memory
from diptych.engine.parallel.shared_memory_communicator import SharedMemoryCommunicator

SLOT_BYTES = 1 << 10
"""So few that some tensors need several exchanges."""
SHAPES = [(1,), (3, 5), (2, 1, 257), (4, 300), (1, 1)]


def of_rank(
    rank: int, turn: int, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
) -> torch.Tensor:
    """Return the numbers of a rank, a turn and a shape, which every rank can make."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * turn + rank))
    return drawn.to(device, dtype)


def exchange(communicator: Communicator, turns: int = 60, device: str = "cpu") -> None:
    """Gather, on all ranks and on one, and check every number."""
    ranks = range(communicator.ranks)
    for turn in range(turns):
        shape = SHAPES[turn % len(SHAPES)]
        dtype = torch.bfloat16 if turn % 3 == 0 else torch.float32
        expected = torch.stack([of_rank(rank, turn, shape, dtype, device) for rank in ranks])
        own = of_rank(communicator.rank, turn, shape, dtype, device)
        if turn % 4:
            assert torch.equal(communicator.all_gather(own), expected), turn
        else:
            found = communicator.gather(own)
            assert (found is None) == (communicator.rank != 0)
            assert found is None or torch.equal(found, expected), turn


def send_to_each(communicator: Communicator, turns: int = 30, device: str = "cpu") -> None:
    """Send every rank other rows, of some none, and check every number; sizes are told every other time."""
    ranks, rank = communicator.ranks, communicator.rank
    for turn in range(turns):
        dtype = (torch.float32, torch.bfloat16, torch.int64)[turn % 3]
        width = (1, 5, 257)[turn % 3]

        def rows(source: int, target: int, turn: int = turn) -> int:
            return 0 if (source + target + turn) % 4 == 0 else (3 * source + 5 * target + turn) % 7

        def between(
            source: int, target: int, turn: int = turn, width: int = width, dtype: torch.dtype = dtype
        ) -> torch.Tensor:
            shape = (rows(source, target, turn), width)
            return (1000 * of_rank(source + 100 * target, turn, shape, torch.float32)).to(device, dtype)

        came = communicator.all_to_all(
            [between(rank, target) for target in range(ranks)],
            [rows(source, rank) for source in range(ranks)] if turn % 2 else None,
        )
        assert len(came) == ranks
        for source, found in enumerate(came):
            assert torch.equal(found, between(source, rank)), (turn, source)


def exchange_in_graph(communicator: Communicator, device: str) -> None:
    """Gather within a CUDA graph, several times in one, and check the numbers of every replay."""
    ranks, shape, times = range(communicator.ranks), (3, 257), 5
    own = torch.zeros(times, *shape, device=device)
    found = torch.zeros(times, communicator.ranks, *shape, device=device)

    def work() -> None:
        for time in range(times):
            found[time].copy_(communicator.all_gather(own[time]))

    replay = capture_for(torch.device(device)).capture(work)
    for turn in range(20):
        numbers = [of_rank(rank, turn, (times, *shape), torch.float32, device) for rank in ranks]
        own.copy_(numbers[communicator.rank])
        replay()
        assert torch.equal(found, torch.stack(numbers, dim=1)), turn


def send_in_graph(communicator: Communicator, device: str) -> None:
    """Send every rank other rows within a CUDA graph, in sizes that are known before."""
    ranks, rank, width = range(communicator.ranks), communicator.rank, 257
    rows = [2 + source for source in ranks]
    own = torch.zeros(communicator.ranks, rows[rank], width, device=device)
    found = torch.zeros(sum(rows), width, device=device)

    def work() -> None:
        found.copy_(torch.cat(communicator.all_to_all(list(own.unbind(0)), rows)))

    replay = capture_for(torch.device(device)).capture(work)
    for turn in range(20):
        shape = (communicator.ranks, rows[rank], width)
        own.copy_(of_rank(rank, turn, shape, torch.float32, device))
        replay()
        expected = [
            of_rank(source, turn, (communicator.ranks, rows[source], width), torch.float32, device)[rank]
            for source in ranks
        ]
        assert torch.equal(found, torch.cat(expected)), turn


def open_communicator(kind: str, rank: int, ranks: int, at: int, device: str = "cpu") -> Communicator:
    torch.set_num_threads(1)
    if kind == "shared_memory":
        return SharedMemoryCommunicator(at, rank, ranks, SLOT_BYTES)
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", at, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=100)
    )
    if kind == "gloo":
        return GlooCommunicator(store, rank, ranks)
    card = torch.device(device)
    torch.cuda.set_device(card)
    if kind == "host":
        return HostCopies(GlooCommunicator(store, rank, ranks), card)
    made = NcclCommunicator(store, rank, ranks, card)
    if kind == "nccl":
        return made
    by_peers = over_peer_memory(made, store, "test", card)
    assert isinstance(by_peers, PeerMemoryCommunicator), "the cards do not reach each other"
    return by_peers


def main(kind: str, rank: int, ranks: int, at: int) -> None:
    """Exchange tensors on the CPU, on one card for all ranks (host), or on one each (nccl, peers)."""
    device = "cpu" if kind in ("shared_memory", "gloo") else "cuda:0" if kind == "host" else f"cuda:{rank}"
    communicator = open_communicator(kind, rank, ranks, at, device)
    exchange(communicator, device=device)
    send_to_each(communicator, device=device)
    if communicator.on_device:
        exchange_in_graph(communicator, device)
        send_in_graph(communicator, device)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
