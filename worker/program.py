"""From settings to exit status: what every kind of worker does around its own parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from runtime.telemetry import Telemetry
from worker.config import WorkerSettings
from worker.engine import LoadedEngine, load_engine


class Worker(Protocol):
    """One kind of worker, put together."""

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop` is set; the process's exit status."""
        ...


Settings = TypeVar("Settings", bound=WorkerSettings)


async def serve_worker(
    settings: Settings,
    stop: asyncio.Event,
    make: Callable[[Settings, LoadedEngine, Telemetry], Worker],
) -> int:
    """Load the model, serve until `stop`, drain; the process's exit status."""
    telemetry = Telemetry.start(f"diptych-{settings.program}", settings.worker_id)
    try:
        return await make(settings, await load_engine(settings), telemetry).run(stop)
    finally:
        telemetry.stop()
