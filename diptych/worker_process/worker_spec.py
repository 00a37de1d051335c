"""What tells one kind of worker from another, as the shell around both needs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from diptych.runtime.discovery.records import Role
from diptych.runtime.metrics import WorkerMetrics
from diptych.runtime.rpc_streams.stream import LinkService
from diptych.worker.v1 import work_pb2
from diptych.worker_process.gateway_link import GatewayLinks
from diptych.worker_process.step_watchdog import StepWatchdog


class EngineLoop(Protocol):
    """What the shell needs of a worker's loop."""

    steps: int
    draining: bool

    @property
    def busy(self) -> bool:
        """Whether a step is being computed now: who is busy and takes no step for long is stuck."""
        ...

    @property
    def clock(self) -> StepWatchdog:
        """How long its steps take."""
        ...

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    async def run(self) -> None: ...
    def tick(self, now: float) -> None: ...
    def hand_back(self) -> None:
        """Give every request back to its gateway, which places it elsewhere."""
        ...

    def close(self) -> None:
        """Wait for the step that is being computed. On any thread, once `run` is over."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker's loop, edges and numbers."""

    role: Role
    loop: EngineLoop
    services: Sequence[LinkService]
    """All that it serves."""
    gateways: GatewayLinks[Any]
    load: Callable[[], work_pb2.Load]
    metrics: WorkerMetrics
    registry: CollectorRegistry
    total_blocks: int = 0
    """Blocks of the pool that others can be granted."""
    owned_keys: Callable[[], Collection[bytes]] = list
    """Prefixes that the directory may name as held here."""
