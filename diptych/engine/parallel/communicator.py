"""The exchange between the ranks of a group: two verbs, which every rank calls in the same order.

Nothing is added up on the way. A library's all-reduce adds in an order of its own, which changes with the
number of ranks; here every rank gets all numbers and adds them in the order of the parts.
"""

from __future__ import annotations

from typing import Protocol

import torch


class GroupBroken(RuntimeError):
    """A rank is gone, or did not answer in time: the group cannot compute any more."""


class Communicator(Protocol):
    """End of a group that one rank holds."""

    rank: int
    ranks: int

    @property
    def on_device(self) -> bool:
        """True if an exchange is queued on the device's current stream, and may be recorded in a CUDA graph.

        The host does not wait for other ranks then: it can neither order what comes later by an exchange, nor
        see what they wrote before it.
        """
        ...

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return `[ranks, *own.shape]`: every rank's tensor, all of one shape. Raises GroupBroken."""
        ...

    def gather(self, own: torch.Tensor) -> torch.Tensor | None:
        """Return the same on rank 0, None on the others. Raises GroupBroken."""
        ...


class Alone:
    """The group of one rank."""

    rank = 0
    ranks = 1
    on_device = True

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return `own` with an axis of ranks."""
        return own.unsqueeze(0)

    def gather(self, own: torch.Tensor) -> torch.Tensor | None:
        """Return `own` with an axis of ranks."""
        return own.unsqueeze(0)
