"""Cancellation of tasks: certain to end them, and not before what must not be left halfway."""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")
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


async def to_its_end(work: Awaitable[T]) -> T:
    """Return what `work` returns. A caller that is cancelled meanwhile, however often, waits for its end
    first.
    """
    running = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait((running,))  # which does not cancel what it waits for
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return running.result()
    if not running.cancelled():
        running.exception()  # it is seen
    try:
        raise cancelled
    finally:
        cancelled = None  # its traceback has this frame: a cycle, which would keep what callers hold
