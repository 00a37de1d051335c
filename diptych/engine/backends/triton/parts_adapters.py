"""Adapters on the device of a rank that computes several parts: each part has tables of its own share.

A whole, which every part reads of q, k, v, gate and up, is on the device once for all of them. Parts are
computed one after another on one stream, so that they share the room between A and B.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.engine.backends.triton.adapters import DeviceAdapters


class PartsAdapters:
    """The adapters of a rank's parts."""

    def __init__(self, own: Sequence[DeviceAdapters]) -> None:
        """Take the adapters of each part, in order."""
        self._own = own

    def scratch(self, tokens: int) -> torch.Tensor:
        """See `PlacedAdapters.scratch`."""
        return self._own[0].scratch(tokens)

    def set(self, slot: int, prepared: object | None) -> None:
        """See `PlacedAdapters.set`; what is prepared is an Adapter for each part (part_adapter.py)."""
        assert prepared is None or isinstance(prepared, tuple)
        shares = [None] * len(self._own) if prepared is None else prepared
        copies: dict[int, torch.Tensor] = {}
        for adapters, share in zip(self._own, shares, strict=True):
            adapters.set(slot, share, copies)
