"""The exchange of ranks that compute on GPUs, through the memory of their host: for ranks that share a card.

A tensor is copied to pinned memory, exchanged there, and copied back. The host waits for both copies, and for
all that was queued before them: nothing of it can be recorded, and every exchange costs a round trip.
"""

from __future__ import annotations

import torch

from diptych.engine.parallel.communicator import Communicator


class HostCopies:
    """End of a group whose tensors are on `device`, over a communicator of the host."""

    on_device = False

    def __init__(self, inner: Communicator, device: torch.device) -> None:
        self._inner, self._device = inner, device
        self.rank, self.ranks = inner.rank, inner.ranks

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_gather`."""
        return self._inner.all_gather(self._on_host(own)).to(self._device)

    def gather(self, own: torch.Tensor) -> torch.Tensor | None:
        """See `Communicator.gather`."""
        everything = self._inner.gather(self._on_host(own))
        return None if everything is None else everything.to(self._device)

    def _on_host(self, own: torch.Tensor) -> torch.Tensor:
        """Return a tensor in pinned memory, once all is computed that it depends on."""
        host = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_cuda)
        return host.copy_(own)
