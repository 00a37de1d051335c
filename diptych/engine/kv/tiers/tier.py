"""Interface of a tier: a bounded store of entries (entry.py) by key, with the key of the block before."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import NamedTuple, Protocol

Entry = bytes | memoryview
"""Stored block with its header (entry.py)."""


class Moved(NamedTuple):
    """Keys that came into a tier and left it by the hands of other workers."""

    came: Set[bytes] = frozenset()
    went: Set[bytes] = frozenset()


class Tier(Protocol):
    """Store of entries. Used by several threads at once; what fails is a miss, never a request's error."""

    @property
    def name(self) -> str:
        """Name of the kind, for metrics and logs."""
        ...

    @property
    def at_once(self) -> int:
        """Reads that it answers at a time; 1 where the next one would only wait for the one before."""
        ...

    @property
    def used(self) -> int:
        """Bytes of the entries that it holds."""
        ...

    def parent_of(self, key: bytes) -> bytes | None:
        """Return the parent of a key that it holds (b"" at a root), None for one that it does not hold.

        Never blocks: it is asked on event loops.
        """
        ...

    def items(self) -> list[tuple[bytes, bytes]]:
        """Return every key that it holds, with its parent. Never blocks."""
        ...

    def rescan(self) -> Moved:
        """Read again which keys it holds, if others may have changed that and the last time is long ago.

        Return those that came and went. Raises OSError. May block.
        """
        ...

    def get(self, key: bytes) -> Entry | None:
        """Return an entry as it was put, unchecked; None for a miss. May block."""
        ...

    def put(self, key: bytes, parent: bytes, entry: Entry) -> list[bytes]:
        """Store an entry; return the keys that left for it. Raises OSError. May block."""
        ...

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove entries. Raises OSError. May block."""
        ...

    def close(self) -> None:
        """Stop; what outlives the process stays."""
        ...
