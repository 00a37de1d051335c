"""Waiting for launched steps on the event loop: no thread has to wake up to say that one is over."""

from __future__ import annotations

import asyncio
import contextlib
import os

from diptych.engine.step_output import Launched

_MANY = 4096  # bytes, one a step


class StepEvents:
    """Of one backend, from its descriptor (`diptych.engine.backend.CompletionFdBackend`)."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._told = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def over(self, step: Launched) -> None:
        """Returns when `collect` would not wait. One caller at a time."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._descriptor, self._hear)
        while True:
            self._told.clear()
            if step.over():  # looked at after clearing: who is told from here on waits for nothing
                await asyncio.sleep(0)  # else steps shorter than the work between them starve the loop
                return
            await self._told.wait()

    def close(self) -> None:
        """Hear of no more. Any thread may call it."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(loop.remove_reader, self._descriptor)

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, _MANY)
        self._told.set()
