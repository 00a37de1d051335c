"""Cards of a group's processes, and the library over which these exchange. The choice is pure.

NCCL takes one process a card. Where processes share one, all exchange over Gloo, with copies through the
host: a group has one kind of exchange.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch.distributed import distributed_c10d as c10d

from diptych.engine.parallel.communicator import GroupBroken

VARIABLE = "DIPTYCH_GROUP_EXCHANGE"
Exchange = Literal["nccl", "gloo", "peers"]
"""`peers` is NCCL, and the memory of the other cards for what is small (peer_memory_communicator.py)."""
_KNOWN: tuple[Exchange, ...] = ("nccl", "gloo", "peers")
_NO_NCCL = "no NCCL"
_LOG = logging.getLogger(__name__)


def choose_exchange(cards: Sequence[str], asked: str) -> Exchange:
    """Return the exchange of processes with these cards, each a card's name or why it has no NCCL.

    `asked` is `auto` or a name. Raises GroupBroken, in words, where what was asked for cannot be had.
    """
    if asked not in ("auto", *_KNOWN):
        raise GroupBroken(f"{VARIABLE} is {asked!r}: it must be auto, {', '.join(_KNOWN)}")
    if asked == "gloo":
        return "gloo"
    shared = [card for card, count in Counter(cards).items() if count > 1 and card != _NO_NCCL]
    why = f"processes share the card {shared[0]}" if shared else _NO_NCCL if _NO_NCCL in cards else None
    if why is None:
        return "peers" if asked == "peers" else "nccl"
    if asked != "auto":
        raise GroupBroken(f"{VARIABLE}={asked}: {why}")
    _LOG.warning("%d processes exchange over Gloo, with copies through the host: %s", len(cards), why)
    return "gloo"


def agree_on_exchange(
    store: c10d.Store,
    number: int,
    count: int,
    device: torch.device,
    environment: Mapping[str, str] = os.environ,
) -> Exchange:
    """Return the exchange of a group of `count` processes at `store`, of which this is `number`, on a GPU.

    Every process tells the others its card. Raises GroupBroken.
    """
    card = name_of_card(device) if c10d.is_nccl_available() else _NO_NCCL
    store.set(f"card-{number}", card)
    cards = [store.get(f"card-{other}").decode() for other in range(count)]
    return choose_exchange(cards, environment.get(VARIABLE) or "auto")


def name_of_card(device: torch.device | int) -> str:
    """Return the name of a card, the same in every process and no other card's."""
    return str(torch.cuda.get_device_properties(device).uuid)
