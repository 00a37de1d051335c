"""Exchange tensors as one rank of a group: KIND RANK RANKS FD_OR_PORT; prints what went wrong."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch

from diptych.engine.parallel.communicator import Communicator
from diptych.engine.parallel.gloo_communicator import GlooCommunicator
from diptych.engine.parallel.shared_memory_communicator import SharedMemoryCommunicator

SLOT_BYTES = 1 << 10
"""So few that some tensors need several exchanges."""
SHAPES = [(1,), (3, 5), (2, 1, 257), (4, 300), (1, 1)]


def of_rank(rank: int, turn: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of a rank, a turn and a shape, which every rank can make."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * turn + rank))
    return drawn.to(dtype)


def exchange(communicator: Communicator, turns: int = 60) -> None:
    """Gather, on all ranks and on one, and check every number."""
    for turn in range(turns):
        shape = SHAPES[turn % len(SHAPES)]
        dtype = torch.bfloat16 if turn % 3 == 0 else torch.float32
        expected = torch.stack([of_rank(rank, turn, shape, dtype) for rank in range(communicator.ranks)])
        own = of_rank(communicator.rank, turn, shape, dtype)
        if turn % 4:
            assert torch.equal(communicator.all_gather(own), expected), turn
        else:
            found = communicator.gather(own)
            assert (found is None) == (communicator.rank != 0)
            assert found is None or torch.equal(found, expected), turn


def open_communicator(kind: str, rank: int, ranks: int, at: int) -> Communicator:
    torch.set_num_threads(1)
    if kind == "shared_memory":
        return SharedMemoryCommunicator(at, rank, ranks, SLOT_BYTES)
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", at, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=100)
    )
    return GlooCommunicator(store, rank, ranks)


if __name__ == "__main__":
    exchange(open_communicator(sys.argv[1], *map(int, sys.argv[2:])))
