"""Counter of the turns that other tasks get on the event loop during a piece of work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def turns_beside(work: Awaitable[T]) -> tuple[T, int]:
    """Return the result of the work and how often other tasks ran meanwhile."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(others())
    try:
        return await work, turns
    finally:
        ticking.cancel()
