"""Copies of blocks that tiers read and write by other means than a view of host memory.

A GPU copies beside its steps (device_copies.py). A group whose ranks have memories of their own gathers and
scatters shares (spread_copies.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from diptych.engine.kv.tiers.pinned import PinnedEntry


class Mark(Protocol):
    """Point in a queue of a device."""

    def synchronize(self) -> None:
        """Wait until the device has come there."""
        ...


class BlockCopies(Protocol):
    """Copies between a pool's blocks and host memory."""

    @property
    def holds(self) -> bool:
        """True if a block has to be held while it is read: that may take as long as a step."""
        ...

    def mark(self) -> Mark:
        """Return the mark after which the blocks that are published now are computed."""
        ...

    def read(self, block: int, computed: Mark) -> PinnedEntry | memoryview:
        """Return a copy of a block. It waits: do not call it on an event loop."""
        ...

    def stage(self, payload: memoryview) -> memoryview:
        """Return the bytes of a block where they can be copied from. Any thread."""
        ...

    async def write(self, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        """Copy staged payloads into blocks that the caller holds, and return when they are there.

        A caller that is cancelled waits for that as well.
        """
        ...
