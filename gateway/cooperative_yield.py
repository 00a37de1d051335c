"""Long work on the event loop in portions: other requests' tokens wait for one of them and not for all.

Portions are counted in items and not in time, so that the same work has the same turns, whatever the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

T = TypeVar("T")
PORTION: Final = 1024  # items of one to three microseconds each


class Yielder:
    """Of one piece of work."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = PORTION

    async def done(self, items: int) -> None:
        """So many more items are done; after each portion of them others have their turn."""
        self._left -= items
        if self._left <= 0:
            self._left = PORTION
            await asyncio.sleep(0)


def slices(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Consecutive parts of at most ``size`` items."""
    return (items[start : start + size] for start in range(0, len(items), size))
