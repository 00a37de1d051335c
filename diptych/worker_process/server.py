"""The shell around a worker's engine loop: server, directory, heartbeats, metrics, drain.

A worker is ready when its weights are loaded and a probe inference has passed; until then it is in no
directory. At SIGTERM, or when it is told to drain, it says so to its gateways and leaves the directory, lets
what runs finish for the first half of its grace, hands the rest back to its gateways, which move it, and
ends. SIGTERM cuts a longer grace that it was told to drain with.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from diptych.runtime.bind_address import join_host_port
from diptych.runtime.discovery.publisher import DirectoryPublisher
from diptych.runtime.discovery.records import WorkerRecord, record_to_json
from diptych.runtime.http_edge import HttpEdge
from diptych.runtime.process import announce_ready, incarnation, leave
from diptych.runtime.rpc import add_health_and_reflection, bind, make_server
from diptych.runtime.rpc_streams.grpc_stream import add_links
from diptych.runtime.rpc_streams.unix_server import UnixServer
from diptych.worker.v1 import work_pb2
from diptych.worker_process.config import WorkerSettings
from diptych.worker_process.drain_deadline import DrainDeadline
from diptych.worker_process.engine_loader import LoadedEngine
from diptych.worker_process.heartbeat import heartbeat
from diptych.worker_process.worker_spec import WorkerSpec

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
"""On two cores that compute in step each wakeup stops both: ten a second cost prompts another hundredth."""
STUCK_S = 60.0
"""A step that is so far past its own generous prediction will not end: somebody should end the process."""
LAST_WORDS_S = 0.2
"""For what was said last to be written, before streams are ended."""
CLOSE_S = 1.0
"""A step gets so long to end when everything else has; whoever waited for it is gone."""


class WorkerServer:
    """Runs one worker from bound port to drained exit."""

    def __init__(self, settings: WorkerSettings, engine: LoadedEngine, kind: WorkerSpec) -> None:
        self._settings = settings
        self._engine = engine
        self._kind = kind
        self._loop = kind.loop
        self._publisher: DirectoryPublisher | None = None
        self._grace_s = settings.drain_s
        self._drain_asked = asyncio.Event()
        kind.metrics.running.set_function(lambda: self._loop.num_running)
        kind.metrics.waiting.set_function(lambda: self._loop.num_waiting)
        kind.metrics.directory_connected.set_function(
            lambda: float(self._publisher is not None and self._publisher.connected)
        )
        engine.runner.on_step = self._count_step

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop` is set or `drain` is called; returns the exit status."""
        settings = self._settings
        server = make_server(internal=True)
        services = self._kind.services
        add_links(server, services)
        health = await add_health_and_reflection(server, [service.method.service for service in services])
        port = bind(server, settings.host, settings.grpc_port, settings.insecure)
        await server.start()
        address = join_host_port(settings.advertise_host or settings.host, port)
        door = UnixServer(services)
        if settings.links == "auto":
            await door.open(address)
        http = await HttpEdge.start(
            settings.host,
            settings.http_port,
            registry=self._kind.registry,
            ready=lambda: not self._why_not_ready(),
            why_not_ready=self._why_not_ready,
            alive=lambda: self._loop.clock.late_s(time.monotonic()) < STUCK_S,
            insecure=settings.insecure,
        )
        engine = asyncio.create_task(self._loop.run(), name="engine-loop")
        beat = asyncio.create_task(self._beat(), name="heartbeat")
        record = self._record(address)
        self._publisher = DirectoryPublisher(settings.redis_url, record, owned_keys=self._kind.owned_keys)
        await self._publisher.start()
        await health.set_ready(True)
        ports = {"grpc_port": port, "http_port": http.port}
        announce_ready(settings, ports, record=record_to_json(record))
        status = await _until(stop, self._drain_asked, engine, beat)
        self._loop.draining = True
        self._beat_once()  # the gateways need not wait to learn that nothing new is taken
        await health.set_ready(False)
        await self._publisher.close()
        if status == 0:
            status = await self._drain(stop, engine, beat)
        await door.close(LAST_WORDS_S)
        await server.stop(LAST_WORDS_S)
        await _end(engine, beat)
        await self._close()
        await http.close()
        return status

    def _count_step(self, seconds: float, tokens: int) -> None:
        self._kind.metrics.step_duration.observe(seconds)
        self._kind.metrics.step_tokens.inc(tokens)

    def prefix_changed(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Tell the directory which prefixes came and went."""
        if self._publisher is not None:
            self._publisher.prefix_changed(list(added), list(removed))

    def _record(self, address: str) -> WorkerRecord:
        fingerprint = self._engine.fingerprint
        return WorkerRecord(
            worker_id=self._settings.worker_id,
            role=self._kind.role,
            address=address,
            incarnation=incarnation(),
            model_digest=fingerprint.model_digest,
            model_name=self._settings.model_name or self._settings.model_path.stem,
            dtype=fingerprint.dtype,
            kv_dtype=fingerprint.kv_dtype,
            kv_layout=fingerprint.kv_layout,
            block_size=fingerprint.block_size,
            max_context=self._engine.model.shape.max_context,
            total_blocks=self._kind.total_blocks,
            num_threads=self._engine.runner.threads,
            replaces=self._settings.replaces,
        )

    def drain(self, grace_s: float | None = None) -> None:
        """Take nothing new from now on; let what is here finish for so long (None: as SIGTERM does), and
        end.
        """
        self._loop.draining = True
        if grace_s is not None:
            self._grace_s = grace_s
        log.info("told to drain within %.1f s", self._grace_s)
        self._drain_asked.set()

    async def _drain(self, stop: asyncio.Event, *tasks: asyncio.Task[None]) -> int:
        """Let what is here finish; what does not in its share of the grace goes back to its gateways.

        The exit status: 1 where one of `tasks`, which should never end, did.
        """
        loop, handed_back = self._loop, False
        grace = DrainDeadline(self._grace_s, time.monotonic())
        while loop.num_running + loop.num_waiting or self._kind.gateways.unsaid:
            if _ended(tasks):
                return 1
            now = time.monotonic()
            if stop.is_set():
                grace.cut(self._settings.drain_s, now)
            if now > grace.over_at:
                break
            if now > grace.hand_back_at and not handed_back:
                log.warning("not everything finished in time: it goes elsewhere")
                loop.hand_back()
                handed_back = True
            await asyncio.sleep(0.05)
        return 0

    async def _close(self) -> None:
        """Wait for a step that is still computed, and hear signals meanwhile. One that never ends is left."""
        closing = asyncio.create_task(asyncio.to_thread(self._loop.close))
        if not (await asyncio.wait((closing,), timeout=CLOSE_S))[0]:
            log.error("the step that is being computed does not end: leaving without it")
            self._engine.runner.rest()  # else its neighbours on the cores would go on waiting for it
            leave(1)
        await closing

    def _beat_once(self) -> work_pb2.Load:
        load = self._kind.load()
        self._kind.gateways.heartbeat(heartbeat(self._loop, load))
        return load

    def _why_not_ready(self) -> str:
        """What keeps it from taking requests, in a line; empty for nothing."""
        if self._publisher is not None and self._publisher.replaced:
            return "another process has its worker id"
        return "it drains" if self._loop.draining else ""

    async def _beat(self) -> None:
        """Say four times a second that the engine moves, or how late its step is, and how loaded it is."""
        while True:
            self._kind.gateways.tick()
            load = self._beat_once()
            if self._publisher is not None:
                self._publisher.set_load(
                    running=load.running,
                    waiting=load.waiting,
                    waiting_tokens=load.waiting_tokens,
                    free_blocks=load.free_blocks,
                )
            self._loop.tick(time.monotonic())
            await asyncio.sleep(HEARTBEAT_S)


async def _until(stop: asyncio.Event, drain: asyncio.Event, *tasks: asyncio.Task[None]) -> int:
    """Wait for one of the signals (0) or the end of a task that should never end (1)."""
    signals = [asyncio.create_task(event.wait()) for event in (stop, drain)]
    await asyncio.wait([*signals, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for signal in signals:
        signal.cancel()
    if stop.is_set() or drain.is_set():
        return 0
    _ended(tasks)
    return 1


def _ended(tasks: Sequence[asyncio.Task[None]]) -> bool:
    """Whether one of these, which should never end, has; the log says why."""
    over = [task for task in tasks if task.done()]
    for task in over:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s stopped: %r", task.get_name(), error, exc_info=error)
    return bool(over)


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
