"""Batches of one gateway, put together: store, runner and routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.access.access import Access
from gateway.call import Calls
from gateway.frontends.batches.line_call import LineRunner
from gateway.frontends.batches.routes import BatchRoutes
from gateway.frontends.batches.runner import BatchRunner
from gateway.frontends.batches.store import BatchStore, StoreLimits
from gateway.frontends.openai.endpoints import Read
from gateway.frontends.openai.generation import Generation

_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Settings of an operator: where batches lie, and how much of them there may be."""

    folder: Path
    concurrency: int
    max_file_mib: int
    max_total_mib: int
    keep_days: float


class Batches:
    """Batches of one gateway: `start` after its ports are open, `stop` when it begins to drain.

    Raises OSError from the constructor, when the folder cannot be made.
    """

    def __init__(
        self,
        settings: BatchSettings,
        calls: Calls,
        access: Access,
        generation: Generation,
        readers: Mapping[str, Read],
    ) -> None:
        limits = StoreLimits(settings.max_file_mib << 20, settings.max_total_mib << 20)
        store = BatchStore(settings.folder, limits)
        lines = LineRunner(calls, generation, readers)
        self._runner = BatchRunner(
            store,
            lines,
            access.caller_of_key,
            concurrency=settings.concurrency,
            keep_s=settings.keep_days * _DAY_S,
        )
        self.routes = BatchRoutes(calls, store, readers, self._runner.wake)

    def start(self) -> None:
        self._runner.start()

    async def stop(self) -> None:
        """Let all batches go; another gateway may take them at once."""
        await self._runner.stop()
