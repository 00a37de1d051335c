"""The differences between prefill and decode workers that their server needs, and the heartbeat of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from diptych.runtime.discovery.records import Role
from diptych.runtime.rpc_streams.stream import LinkService
from diptych.runtime.worker_metrics import StepMetrics
from diptych.worker.v1 import work_pb2
from diptych.worker_process.gateway_link import GatewayLinks
from diptych.worker_process.step_watchdog import StepWatchdog
from kvtransfer.drivers.types import Heartbeat


class EngineLoop(Protocol):
    """A worker's engine loop, as its server sees it."""

    steps: int
    draining: bool

    @property
    def busy(self) -> bool:
        """True while a step is being computed: a worker that is busy and ends no step for long is stuck."""
        ...

    @property
    def watchdog(self) -> StepWatchdog:
        """Durations of its steps."""
        ...

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    async def run(self) -> None: ...
    def tick(self, now: float) -> None: ...
    def hand_back(self) -> None:
        """Return every request to its gateway, which places it elsewhere."""
        ...

    def close(self) -> None:
        """Wait for the step that is being computed. Call it on any thread, once `run` has ended."""
        ...


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """Fields of a worker's engine in the directory; see `diptych.runtime.discovery.records.WorkerRecord`."""

    model_digest: str
    dtype: str
    block_size: int
    max_context: int
    num_threads: int
    kv_dtype: str = ""
    kv_layout: str = ""
    draft_digest: str = ""
    window_blocks: int = 0
    window_places: int = 0
    image_rows: str = ""
    encodes: int = 0


class ServedEngine(Protocol):
    """The engine of a worker, as its server sees it."""

    @property
    def record(self) -> EngineRecord:
        """Return what others must know to work with it."""
        ...

    @property
    def computes(self) -> str:
        """Return what it computes in, in words."""
        ...

    @property
    def device_type(self) -> str:
        """Return the type of its device: cpu or cuda."""
        ...

    def count_steps(self, on_step: Callable[[float, int], None]) -> None:
        """Call `on_step(seconds, tokens)` after each step from now on."""
        ...

    def yield_cores(self) -> None:
        """Let other workers use its cores, though a step of it may not have ended."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The loop, services and numbers of a worker."""

    role: Role
    loop: EngineLoop
    services: Sequence[LinkService]
    gateways: GatewayLinks[Any]
    load: Callable[[], work_pb2.Load]
    metrics: StepMetrics
    registry: CollectorRegistry
    total_blocks: int = 0
    """Blocks of the pool that prefill workers can be granted."""
    owned_keys: Callable[[], Collection[bytes]] = list
    """Prefixes that the directory may name as held here."""
    tiered_keys: Callable[[], Collection[bytes]] = list
    """Prefixes that it may name as held in a tier of this worker."""
    memory_domain: str = ""
    """Name that is equal for workers that compute in one memory."""


def engine_heartbeat(loop: EngineLoop) -> Heartbeat:
    """Return the state of the engine now, for the links to workers of the other role."""
    return Heartbeat(loop.steps, loop.busy, loop.watchdog.late_s(time.monotonic()))


_WIRE_ROLES: Mapping[Role, work_pb2.WorkerRole] = {
    "prefill": work_pb2.WORKER_ROLE_PREFILL,
    "decode": work_pb2.WORKER_ROLE_DECODE,
}


def heartbeat(loop: EngineLoop, load: work_pb2.Load, becomes: Role | None = None) -> work_pb2.Heartbeat:
    """Return the heartbeat for gateways; completes `load` with step times and the drain state.

    `becomes`: the role in which the worker will be started again.
    """
    for one in loop.watchdog.times(time.monotonic()):
        step_time = load.step_times.add(size_class=one.size_class, steps=one.steps, tokens=one.tokens)
        step_time.median.FromNanoseconds(round(one.median_s * 1e9))
    load.draining = loop.draining
    if becomes is not None:
        load.becomes = _WIRE_ROLES[becomes]
    beat = engine_heartbeat(loop).to_proto()
    beat.load.CopyFrom(load)
    return beat
