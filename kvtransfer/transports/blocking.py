"""Waits for a GPU or another process, off the event loop.

Host code runs ahead of a GPU, and promises must not. The engine queues a worker's steps on the default stream
of its device, so that an event recorded there after a step's call returned comes when the step's writes are
done. On the CPU the call itself has written them.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from diptych.engine.kv.kv_memory import KVMemory

T = TypeVar("T")


class BlockingThread:
    """Thread that runs blocking calls one after another, so that neither an event loop nor an engine blocks.

    It is a daemon: a call that never returns does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the call's result or raise its error.

        A call that has begun goes on if the caller is cancelled.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            if result.cancelled():
                return
            try:
                settle, value = _set_result, function(*arguments)
            except BaseException as error:
                settle, value = _set_error, error  # type: ignore[assignment]
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, value)

        self._calls.put(call)
        return await result

    def call(self, function: Callable[[], None]) -> None:
        """Run a call after those that wait; nothing hears of its end."""
        self._calls.put(function)

    def stop(self) -> None:
        """End after the calls that wait."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # with it the arguments: the thread may wait for long


def _set_result(result: asyncio.Future[Any], value: Any) -> None:
    if not result.done():
        result.set_result(value)


def _set_error(result: asyncio.Future[Any], error: BaseException) -> None:
    if not result.done():
        result.set_exception(error)


async def finished(call: asyncio.Future[T]) -> T:
    """Wait until a call that cannot be called back is over, also if this task is cancelled meanwhile."""
    cancelled = False
    while not call.done():
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return call.result()


def queued_work(memory: KVMemory) -> torch.cuda.Event | None:
    """Return the event after which all steps queued until now have written to `memory`; None: they have."""
    device = memory.data.device
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.default_stream(device))
    return event


async def wait_written(memory: KVMemory) -> None:
    """Wait until all steps queued until now have written to `memory`, without blocking the event loop."""
    event = queued_work(memory)
    if event is not None:
        await asyncio.to_thread(event.synchronize)
