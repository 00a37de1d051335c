"""Waiting for what other tasks and processes bring about."""

import asyncio
import time
from collections.abc import Callable

_STEP_S = 0.005


async def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> float:
    """Waits until `condition` holds and returns how long that took, in seconds; else TimeoutError."""
    start = time.monotonic()
    for _ in range(int(timeout_s / _STEP_S)):
        if condition():
            return time.monotonic() - start
        if time.monotonic() - start > timeout_s:
            break
        await asyncio.sleep(_STEP_S)
    raise TimeoutError("it did not happen")
