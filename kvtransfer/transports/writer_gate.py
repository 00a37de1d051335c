"""Fence of a writer within the own process: a gate that its steps pass, and the event behind the last one.

    open      → a step enters, computes, waits for the event behind its work on its stream, and leaves
    closed    → no step enters; once none is inside, `on_death` is called: no store can come from here on
    stuck     → a step is inside `FENCE_S` after the gate was closed: the process ends

It stands where a pidfd stands for a writer in another process (writer_process.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator

import torch

FENCE_S = 5.0
"""Seconds that a step may take to end after its writer was fenced, before the process ends."""
_log = logging.getLogger(__name__)


class WriterFenced(RuntimeError):
    """A step that would write for a writer that was fenced."""


def end_process() -> None:
    """End this process as a fence from outside would: nothing of it writes afterwards."""
    _log.critical("a writer of this process does not stop: the process ends")
    logging.shutdown()
    os.kill(os.getpid(), signal.SIGKILL)


class WriterGate:
    """Gate of one writer into one pool. Steps pass it on any thread; all else is on the event loop."""

    def __init__(self, on_stuck: Callable[[], None] = end_process) -> None:
        """Open the gate; `on_stuck` is called where a step does not end in time."""
        self.pid = os.getpid()
        self._on_stuck = on_stuck
        self._lock = threading.Lock()
        self._inside = 0
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_death: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def closed(self) -> bool:
        """True once the writer was fenced."""
        return self._closed

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Be inside for a step, until its work on the current stream is done. Raises WriterFenced.

        Where the stream cannot be waited for, the step counts as inside for ever: it proves nothing.
        """
        with self._lock:
            if self._closed:
                raise WriterFenced("this writer was fenced")
            self._inside += 1
        try:
            yield
        finally:
            _await_stream()
            self._leave()

    def kill(self) -> None:
        """Close the gate. `watch` reports when no step is inside any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            inside = self._inside
        if self._loop is None:
            return
        if inside:
            self._timer = self._loop.call_later(FENCE_S, self._on_stuck)
        else:
            self._loop.call_soon(self._stopped)

    def watch(self, on_death: Callable[[], None]) -> None:
        """Call `on_death` once on the running loop when the gate is closed and no step is inside."""
        self._loop, self._on_death = asyncio.get_running_loop(), on_death

    def close(self) -> None:
        """Report nothing any more."""
        self._on_death = None
        if self._timer is not None:
            self._timer.cancel()

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
            last = self._closed and self._inside == 0
        if last and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopped)

    def _stopped(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        on_death, self._on_death = self._on_death, None
        if on_death is not None:
            on_death()


def _await_stream() -> None:
    """Wait for the event behind all work that was queued on the current stream, where there is a GPU."""
    if torch.cuda.is_initialized():
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
