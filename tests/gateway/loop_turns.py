"""Counts the turns that others have on the event loop while a piece of work is done there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def turns_beside(work: Awaitable[T]) -> tuple[T, int]:
    """What the work comes to, and how often somebody else was let in meanwhile."""
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
