"""Room for KV blocks on the cards of a group's ranks, of which several may share one. The count is pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diptych.engine.device import device_memory, pool_bytes
from diptych.engine.parallel.cards import name_of_card


@dataclass(frozen=True)
class CardRoom:
    """Memory of a rank's card, in bytes."""

    card: str
    """Name, the same for every rank that is on it."""
    total: int
    free: int
    used: int
    """Taken by this rank."""
    block: int
    """Size of this rank's share of a block."""


def room_of_card(device: torch.device, block: int) -> CardRoom:
    """Return the memory of a rank's CUDA device as it is now."""
    return CardRoom(name_of_card(device), *device_memory(device), block)


def blocks_with_room(rooms: Sequence[CardRoom], utilization: float, recordings: int, temporaries: int) -> int:
    """Return the blocks of which every card has room for the shares of all its ranks.

    `utilization` of a card is the worker's: its ranks there divide it. The last two are what each rank
    needs, as for `pool_bytes`. Not above 0 where a card has no room.
    """
    by_card: dict[str, list[CardRoom]] = defaultdict(list)
    for room in rooms:
        by_card[room.card].append(room)
    return min(
        pool_bytes(
            total=ranks[0].total,
            free=min(rank.free for rank in ranks),
            used=sum(rank.used for rank in ranks),
            utilization=utilization,
            recordings=recordings,
            temporaries=temporaries,
            ranks=len(ranks),
        )
        // sum(rank.block for rank in ranks)
        for ranks in by_card.values()
    )
