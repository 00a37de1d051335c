"""A worker's process from settings to exit status."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol, TypeVar

import torch

from diptych.engine.backends.native.backend import NativeUnavailable
from diptych.engine.backends.triton.operators import TritonUnavailable
from diptych.engine.device import DeviceUnavailable
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights.canonical import BadModelFile
from diptych.runtime.process import leave
from diptych.runtime.settings import StartupError
from diptych.runtime.telemetry import Telemetry
from diptych.worker_process.config import RoleSettings

_MISTAKES = (
    BadModelFile,
    DeviceUnavailable,
    FileNotFoundError,
    NativeUnavailable,
    PermissionError,
    TritonUnavailable,
    UnsupportedModel,
    torch.OutOfMemoryError,
)
"""Errors of the engine, which knows no programs, for files and devices that it cannot work with."""


class Worker(Protocol):
    """A worker of any role."""

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop` is set; return the process's exit status."""
        ...


Settings = TypeVar("Settings", bound=RoleSettings)
Engine = TypeVar("Engine")


async def serve_worker(
    settings: Settings,
    stop: asyncio.Event,
    make: Callable[[Settings, Engine, Telemetry], Worker],
    load: Callable[[Settings], Awaitable[Engine]],
) -> int:
    """Load what it computes with, serve until `stop`, drain; return the process's exit status.

    Raises StartupError.
    """
    telemetry = Telemetry.start(f"diptych-{settings.program}", settings.worker_id)
    try:
        with startup_errors():
            worker = make(settings, await loaded_unless(stop, load(settings)), telemetry)
        return await worker.run(stop)
    finally:
        telemetry.stop()


@contextlib.contextmanager
def startup_errors() -> Iterator[None]:
    """Raise StartupError for an error of the engine that another start would not mend."""
    try:
        yield
    except _MISTAKES as error:
        raise StartupError(str(error)) from error


async def loaded_unless(stop: asyncio.Event, loads: Awaitable[Engine]) -> Engine:
    """Return the engine; exit the process if `stop` is set first: nothing else ends the thread that loads."""
    loading = asyncio.ensure_future(loads)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        leave(0)
    stopping.cancel()
    return await loading
