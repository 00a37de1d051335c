"""The shell around a worker's engine loop: server, directory, heartbeats, metrics, drain.

A worker is ready when its weights are loaded and a first step has been computed; until then it is in no
directory. At SIGTERM it leaves the directory first, lets what runs finish for `drain_s` seconds,
hands the rest back to its gateways, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
from prometheus_client import CollectorRegistry

from diptych.worker.v1 import work_pb2
from runtime.directory.publisher import DirectoryPublisher
from runtime.http_edge import HttpEdge
from runtime.metrics import WorkerMetrics
from runtime.process import announce_ready
from runtime.rpc import add_health_and_reflection, bind, make_server
from worker.config import WorkerSettings
from worker.gateway_link import GatewayStream

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
HAND_BACK_S = 1.0
"""What was handed back may still be written by a step: so long it gets to end and say so."""


class EngineLoop(Protocol):
    """What the shell needs of either worker's loop."""

    steps: int
    draining: bool

    @property
    def busy(self) -> bool:
        """Whether a step is being computed now: who is busy and takes no step for long is stuck."""
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

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Services:
    """What the worker serves: names for health and reflection, and how to add them to a server."""

    names: Sequence[str]
    add: Callable[[grpc.aio.Server], None]


class WorkerShell:
    """Runs one worker from bound port to drained exit."""

    def __init__(
        self,
        settings: WorkerSettings,
        loop: EngineLoop,
        services: Services,
        *,
        streams: Collection[GatewayStream],
        load: Callable[[], work_pb2.Load],
        metrics: WorkerMetrics,
        registry: CollectorRegistry,
    ) -> None:
        self._settings = settings
        self._loop = loop
        self._services = services
        self._streams = streams
        self._load = load
        self._metrics = metrics
        self._registry = registry
        self._publisher: DirectoryPublisher | None = None
        metrics.running.set_function(lambda: loop.num_running)
        metrics.waiting.set_function(lambda: loop.num_waiting)
        metrics.directory_connected.set_function(
            lambda: float(self._publisher is not None and self._publisher.connected)
        )

    async def run(self, stop: asyncio.Event, publish: Callable[[str], DirectoryPublisher]) -> int:
        """Serve until `stop` is set; returns the exit status. `publish` makes an address's publisher."""
        settings = self._settings
        server = make_server(internal=True)
        self._services.add(server)
        health = await add_health_and_reflection(server, self._services.names)
        port = bind(server, settings.host, settings.grpc_port, settings.insecure)
        await server.start()
        http = await HttpEdge.start(
            settings.host,
            settings.http_port,
            registry=self._registry,
            ready=lambda: not self._loop.draining,
            insecure=settings.insecure,
        )
        engine = asyncio.create_task(self._loop.run(), name="engine-loop")
        beat = asyncio.create_task(self._beat(), name="heartbeat")
        self._publisher = publish(f"{settings.advertise_host or settings.host}:{port}")
        await self._publisher.start()
        await health.set_ready(True)
        announce_ready(settings, {"grpc_port": port, "http_port": http.port})
        status = await _until(stop, engine, beat)
        self._loop.draining = True
        await health.set_ready(False)
        await self._publisher.close()
        if status == 0:
            await self._drain()
        await server.stop(0.2)
        for task in (engine, beat):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        self._loop.close()
        await http.close()
        return status

    async def _drain(self) -> None:
        """Let what is here finish; what does not within the grace period goes back to its gateways."""
        if await self._emptied(self._settings.drain_s):
            return
        log.warning("not everything finished within %.0f s: it goes elsewhere", self._settings.drain_s)
        self._loop.hand_back()
        await self._emptied(HAND_BACK_S)

    async def _emptied(self, seconds: float) -> bool:
        """Wait for the last request to end; False when it does not in time."""
        until = time.monotonic() + seconds
        while self._loop.num_running + self._loop.num_waiting:
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.05)
        return True

    async def _beat(self) -> None:
        """Say four times a second that the engine moves, and how loaded it is."""
        while True:
            load = self._load()
            beat = work_pb2.Heartbeat(progress=self._loop.steps, busy=self._loop.busy, load=load)
            for stream in tuple(self._streams):
                stream.heartbeat(beat)
            if self._publisher is not None:
                self._publisher.set_load(
                    running=load.running,
                    waiting=load.waiting,
                    waiting_tokens=load.waiting_tokens,
                    free_blocks=load.free_blocks,
                )
            self._loop.tick(time.monotonic())
            await asyncio.sleep(HEARTBEAT_S)


async def _until(stop: asyncio.Event, *tasks: asyncio.Task[None]) -> int:
    """Wait for the stop signal (0) or the end of a task that should never end (1)."""
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        return 0
    stopped.cancel()
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s stopped: %r", task.get_name(), error, exc_info=error)
    return 1
