"""Cancellation of tasks that is certain to end them."""

import asyncio
import logging
from typing import Any

_AGAIN_S = 0.05
_log = logging.getLogger(__name__)


async def end_task(task: "asyncio.Task[Any] | None") -> None:
    """Cancel a task and waits until it has ended; an error it ends with is logged. None is no task.

    One `cancel()` is not enough: `asyncio.wait_for` of Python 3.11, which redis-py calls for every
    command, loses a cancellation that arrives while its own result does (python/cpython#86296), and
    the task then works on. So the task is cancelled again until it obeys.
    """
    if task is None:
        return
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_AGAIN_S)
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("task %s ended with an error", task.get_name(), exc_info=error)
