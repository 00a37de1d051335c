"""The exchange of small tensors between the GPUs of one host, through each other's memory.

    a rank    copies its tensor into its slot of memory that all cards reach
    all       meet, read every slot, and meet again: after that, slots may be written

It is one way over the cards' links, where a library makes several steps. torch.distributed's symmetric memory
makes the slots and the meeting (https://docs.pytorch.org/docs/stable/symmetric_memory.html, an alpha API);
both are queued on the current stream, and may be captured. Larger tensors go by the communicator below.

Written against torch's documentation. No machine with two GPUs was at hand: it has never run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from diptych.engine.parallel.cards import name_of_card
from diptych.engine.parallel.communicator import Communicator

_LOG = logging.getLogger(__name__)
SLOT_BYTES = 256 << 10
"""Largest tensor that goes this way: a row of 8,192 bfloat16 numbers of sixteen sequences."""

_CHANGED = (RuntimeError, AttributeError, TypeError)
"""Errors of a torch that does not have this, or has it by other names."""


class PeerMemoryCommunicator:
    """A rank's end of a group whose cards reach each other's memory."""

    on_device = True

    def __init__(self, inner: Communicator, slots: Any, meeting: Any) -> None:
        """Take this rank's slot, uint8 `[SLOT_BYTES]` in memory that all reach, and its handle
        (`open_slots`).

        What does not fit into a slot goes by `inner`.
        """
        self.rank, self.ranks = inner.rank, inner.ranks
        self._inner, self._own, self._meeting = inner, slots, meeting
        self._every = [meeting.get_buffer(rank, slots.shape, slots.dtype) for rank in range(self.ranks)]

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_gather`."""
        if not 0 < own.nbytes <= len(self._own):
            return self._inner.all_gather(own)
        size = own.nbytes
        self._own[:size].copy_(own.contiguous().view(-1).view(torch.uint8))
        self._meeting.barrier(channel=0)
        everything = torch.stack([slot[:size] for slot in self._every])
        self._meeting.barrier(channel=1)
        return everything.view(own.dtype).view(self.ranks, *own.shape)

    def gather(self, own: torch.Tensor) -> torch.Tensor | None:
        """See `Communicator.gather`."""
        everything = self.all_gather(own)
        return everything if self.rank == 0 else None

    def all_to_all(
        self, own: Sequence[torch.Tensor], rows: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """See `Communicator.all_to_all`: rows go by the communicator below."""
        return self._inner.all_to_all(own, rows)


def over_peer_memory(inner: Communicator, store: c10d.Store, name: str, device: torch.device) -> Communicator:
    """Return a communicator through the cards' memory, or `inner` where a card does not reach all others or
    the exchange of known numbers fails. Every rank gets the same kind.
    """
    if not _agreed(inner, device, works=_reaches_all(inner, store, device)):
        _LOG.warning("small tensors go by NCCL: not every card reaches the memory of the others")
        return inner
    made, why = None, "another rank could not open its slots"
    try:
        made = PeerMemoryCommunicator(inner, *open_slots(inner, store, name, device))
    except _CHANGED as error:
        why = str(error)
    # Agreed before numbers are exchanged: a rank without slots would leave the others at their meeting.
    if _agreed(inner, device, works=made is not None) and made is not None:
        if _agreed(inner, device, works=_exchanges(made, device)):
            return made
        why = "an exchange gave other numbers"
    _LOG.warning("small tensors go by NCCL: %s", why)
    return inner


def open_slots(inner: Communicator, store: c10d.Store, name: str, device: torch.device) -> tuple[Any, Any]:
    """Return this rank's slot, and the handle by which it reaches the others'. Raises RuntimeError."""
    from torch._C._distributed_c10d import _SymmetricMemory

    _SymmetricMemory.set_group_info(name, inner.rank, inner.ranks, store)
    slots = _SymmetricMemory.empty_strided_p2p((SLOT_BYTES,), (1,), torch.uint8, device, name)
    return slots, _SymmetricMemory.rendezvous(slots)


def _reaches_all(inner: Communicator, store: c10d.Store, device: torch.device) -> bool:
    """Return whether this rank's card reaches those of all others, which must be on its host.

    A card of another host, or one that this process does not see, has no number here.
    """
    here = {name_of_card(number): number for number in range(torch.cuda.device_count())}
    store.set(f"peer-{inner.rank}", name_of_card(device))
    numbers = [here.get(store.get(f"peer-{rank}").decode()) for rank in range(inner.ranks)]
    own = numbers[inner.rank]
    return own is not None and all(
        number is not None and (number == own or torch.cuda.can_device_access_peer(own, number))
        for number in numbers
    )


def _exchanges(made: PeerMemoryCommunicator, device: torch.device) -> bool:
    """Return whether known numbers come over, twice: the second time slots are written again."""
    try:
        for time in range(2):
            numbers = torch.arange(1024, device=device) + 10_000 * made.rank + time
            expected = torch.stack([numbers + 10_000 * (rank - made.rank) for rank in range(made.ranks)])
            if not torch.equal(made.all_gather(numbers), expected):
                return False
    except _CHANGED as error:
        _LOG.warning("the cards' memory is not exchanged: %s", error)
        return False
    return True


def _agreed(inner: Communicator, device: torch.device, *, works: bool) -> bool:
    """Return whether it works for every rank."""
    return bool(inner.all_gather(torch.tensor([works], dtype=torch.uint8, device=device)).all())
