"""Long work on the event loop in portions, so that other requests' tokens wait for one portion only.

Portions are counted in items, not in time: the same work yields at the same places on every machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

T = TypeVar("T")
PORTION: Final = 1024  # items of one to three microseconds each


class Yielder:
    """Counter of one piece of work that yields to the event loop after each portion."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = PORTION

    async def done(self, items: int) -> None:
        """Count ``items`` finished items; yield to the event loop after each portion."""
        self._left -= items
        if self._left <= 0:
            self._left = PORTION
            await asyncio.sleep(0)


def slices(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield consecutive slices of at most ``size`` items."""
    return (items[start : start + size] for start in range(0, len(items), size))
