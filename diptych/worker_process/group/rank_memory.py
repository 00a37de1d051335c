"""Uses of a rank's memory, once its worker knows the number of its blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from diptych.engine.parallel.cards import name_of_card

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that one process of a group holds, by use."""

    weights: int
    blocks: int
    """Share of the worker's blocks; 0 where it maps those of rank 0."""
    other: int = 0
    """Recordings, buffers and tables on a GPU; 0 on a CPU, where they are not counted."""
    left: int | None = None
    """Free on its GPU beside all that; None on a CPU, whose memory the ranks share."""
    coming: int = 0
    """Bytes of the blocks that are not allocated yet: a peer has to need them first."""
    card: str = ""
    """Name of the GPU, the same for every rank that is on it; empty on a CPU."""

    def describe(self) -> str:
        """Return the uses as words for a log."""
        uses = [f"weights {self.weights // _MIB}", f"share of the KV blocks {self.blocks // _MIB}"]
        if self.left is not None:
            uses += [f"recordings and buffers {self.other // _MIB}", f"left {self.left // _MIB}"]
        return f"MiB: {', '.join(uses)}"


def split_device_memory(
    *, weights: int, blocks: int, allocated: int, reserved: int, free: int, card: str = ""
) -> RankMemory:
    """Return the uses of a GPU on which tensors take `reserved` bytes, and `free` are free.

    `allocated` of a rank's `blocks` are there already; the rest comes when a peer first needs it.
    """
    other = max(0, reserved - weights - allocated)
    coming = max(0, blocks - allocated)
    return RankMemory(weights, blocks, other, free - coming, coming, card)


def share_cards(ranks: Sequence[RankMemory]) -> list[RankMemory]:
    """Return the uses of all ranks of a group, with what is left beside the blocks to come of every rank that
    is on the same GPU.
    """
    coming: Counter[str] = Counter()
    free: dict[str, int] = {}
    for rank in ranks:
        if rank.left is not None:
            coming[rank.card] += rank.coming
            found = rank.left + rank.coming
            free[rank.card] = min(free.get(rank.card, found), found)
    return [
        rank if rank.left is None else replace(rank, left=free[rank.card] - coming[rank.card])
        for rank in ranks
    ]


def measure_rank(device: torch.device, weights: int, blocks: int, allocated: int) -> RankMemory:
    """Return what this process takes of `device` now; see `split_device_memory`."""
    if device.type != "cuda":
        return RankMemory(weights, blocks)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return split_device_memory(
        weights=weights,
        blocks=blocks,
        allocated=allocated,
        reserved=torch.cuda.memory_reserved(device),
        free=torch.cuda.mem_get_info(device)[0],
        card=name_of_card(device),
    )
