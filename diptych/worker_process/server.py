"""The server of a worker: ports, directory, heartbeats, metrics and drain around its engine loop.

A worker is ready when its weights are loaded and its self-test has passed; until then it is in no
directory. At SIGTERM, or at a Drain message, it reports that to its gateways and leaves the directory, lets
running requests finish for the first half of its grace, returns the others to their gateways, which move
them, and exits. SIGTERM shortens a longer grace of the Drain message. One that is to change its role exits
with the status by which its supervisor starts the other program (diptych/runtime/role_change.py); SIGTERM
takes that back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict

from diptych.runtime.bind_address import join_host_port
from diptych.runtime.discovery.publisher import DirectoryPublisher
from diptych.runtime.discovery.records import Role, WorkerRecord, record_to_json
from diptych.runtime.http_edge import HttpEdge
from diptych.runtime.model_name import model_names
from diptych.runtime.otlp_export import start_metric_export
from diptych.runtime.process import announce_ready, incarnation, leave
from diptych.runtime.role_change import EXIT_STATUS, ROLES
from diptych.runtime.rpc import add_health_and_reflection, bind, make_server
from diptych.runtime.rpc_streams.grpc_stream import add_links
from diptych.runtime.rpc_streams.unix_server import UnixServer
from diptych.worker.v1 import work_pb2
from diptych.worker_process.busy_share import BusyShare
from diptych.worker_process.config import RoleSettings
from diptych.worker_process.gateway_link import DrainOrder
from diptych.worker_process.worker_spec import ServedEngine, WorkerSpec, heartbeat

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
"""Interval: each wakeup stops both of two cores that compute in step; ten a second cost prompts 1% more."""
STUCK_S = 60.0
"""A step that is so far past its own generous prediction will not end: GET /health fails."""
LAST_MESSAGES_S = 0.2
"""Time for the last messages to be written, before streams are ended."""
CLOSE_S = 1.0
"""Time for the running step to end after everything else: its requests are gone."""
FINISHING_SHARE = 0.5
"""Part of the grace in which requests may finish; returned ones have as long to find another worker."""
HAND_BACK_S = 1.0
"""Time for a step that still writes returned requests to end and report it."""


class DrainDeadline:
    """The times of a drain: at `hand_back_at` unfinished requests are returned, at `end_at` the worker exits.

    Times are seconds on any one clock.
    """

    def __init__(self, seconds: float, now: float) -> None:
        self.hand_back_at = self.end_at = math.inf
        self.shorten(seconds, now)

    def shorten(self, seconds: float, now: float) -> None:
        """Allow at most `seconds` from `now` on. A later call with the same seconds changes nothing."""
        finishing_s = FINISHING_SHARE * seconds
        self.hand_back_at = min(self.hand_back_at, now + finishing_s)
        self.end_at = min(self.end_at, now + max(seconds, finishing_s + HAND_BACK_S))


class WorkerServer:
    """Runs one worker from bound port to drained exit."""

    def __init__(self, settings: RoleSettings, engine: ServedEngine, spec: WorkerSpec) -> None:
        self._settings = settings
        self._engine = engine
        self._spec = spec
        self._loop = spec.loop
        self._publisher: DirectoryPublisher | None = None
        self._grace_s = settings.worker_shutdown_timeout
        self._drain_requested = asyncio.Event()
        self._becomes: Role | None = None
        self._busy = BusyShare()
        spec.metrics.running.set_function(lambda: self._loop.num_running)
        spec.metrics.waiting.set_function(lambda: self._loop.num_waiting)
        spec.metrics.directory_connected.set_function(
            lambda: float(self._publisher is not None and self._publisher.connected)
        )
        engine.count_steps(self._count_step)

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop` is set or `drain` is called; return the exit status."""
        settings = self._settings
        server = make_server(internal=True)
        services = self._spec.services
        tls = settings.link_tls
        add_links(server, services, authenticated=tls is not None)
        health = await add_health_and_reflection(server, [service.method.service for service in services])
        credentials = None if tls is None else tls.server_credentials()
        port = bind(server, settings.host, settings.grpc_port, settings.insecure, credentials)
        await server.start()
        address = join_host_port(settings.advertise_host or settings.host, port)
        unix_server = UnixServer(services)
        if settings.worker_rpc == "auto":
            await unix_server.open(address)
        http = await HttpEdge.start(
            settings.host,
            settings.http_port,
            registry=self._spec.registry,
            ready=lambda: not self._not_ready_reason(),
            why_not_ready=self._not_ready_reason,
            alive=lambda: self._loop.watchdog.late_s(time.monotonic()) < STUCK_S,
            tls=None if tls is None else tls.http,
            insecure=settings.insecure,
            config_digest=settings.digest,
            computes=self._engine.computes,
        )
        name = f"diptych-{settings.program}"
        metric_export = start_metric_export(self._spec.registry, name, settings.worker_id)
        engine = asyncio.create_task(self._loop.run(), name="engine-loop")
        beat = asyncio.create_task(self._send_heartbeats(), name="heartbeat")
        record = self._record(address)
        self._publisher = DirectoryPublisher(
            settings.redis_url,
            record,
            owned_keys=self._spec.owned_keys,
            tiered_keys=self._spec.tiered_keys,
        )
        await self._publisher.start()
        await health.set_ready(True)
        ports = {"grpc_port": port, "http_port": http.port}
        announce_ready(settings, ports, record=record_to_json(record))
        status = await _until(stop, self._drain_requested, engine, beat)
        self._loop.draining = True
        self._send_heartbeat()  # gateways learn at once that nothing new is taken
        await health.set_ready(False)
        await self._publisher.close()
        if status == 0:
            status = await self._drain(stop, engine, beat)
        await unix_server.close(LAST_MESSAGES_S)
        await server.stop(LAST_MESSAGES_S)
        await _end(engine, beat)
        if metric_export is not None:
            await metric_export.close()
        await self._close()
        await http.close()
        if status == 0 and self._becomes is not None and not stop.is_set():
            return EXIT_STATUS[self._becomes]
        return status

    def _roles(self) -> tuple[Role, ...]:
        """Return the roles in which a supervisor can start this worker; none where it keeps its role."""
        changes, device = self._settings.role_changes, self._engine.device_type
        return ROLES if changes == "any" or changes == device else ()

    def _count_step(self, seconds: float, tokens: int) -> None:
        self._spec.metrics.step_duration.observe(seconds)
        self._spec.metrics.step_tokens.inc(tokens)
        self._busy.record(seconds, time.monotonic())

    def prefix_changed(
        self, added: Sequence[bytes], removed: Sequence[bytes], tiered: Sequence[bytes] = ()
    ) -> None:
        """Publish to the directory which prefixes were added, removed, and left for a tier."""
        if self._publisher is not None:
            self._publisher.prefix_changed(list(added), list(removed), list(tiered))

    def _record(self, address: str) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self._settings.worker_id,
            role=self._spec.role,
            address=address,
            incarnation=incarnation(),
            model_name=model_names(self._settings.model_path, self._settings.model_name).name,
            total_blocks=self._spec.total_blocks,
            replaces=self._settings.replaces,
            memory_domain=self._spec.memory_domain,
            roles=",".join(self._roles()),
            **asdict(self._engine.record),
        )

    def drain(self, order: DrainOrder) -> None:
        """Take nothing new, let requests finish for the order's seconds (None: as at SIGTERM), and exit."""
        if order.become is not None:
            if order.become not in self._roles():
                log.warning("no supervisor can start this worker as a %s worker: it stays", order.become)
                return
            self._becomes = None if order.become == self._spec.role else order.become
        self._loop.draining = True
        if order.grace_s is not None:
            self._grace_s = order.grace_s
        then = "" if self._becomes is None else f", to be a {self._becomes} worker"
        log.info("draining within %.1f s%s", self._grace_s, then)
        self._drain_requested.set()

    async def _drain(self, stop: asyncio.Event, *tasks: asyncio.Task[None]) -> int:
        """Let requests finish; return those that do not in time to their gateways.

        Returns the exit status: 1 where one of `tasks`, which should never end, did.
        """
        loop, handed_back = self._loop, False
        deadline = DrainDeadline(self._grace_s, time.monotonic())
        while loop.num_running + loop.num_waiting or self._spec.gateways.has_pending:
            if _ended(tasks):
                return 1
            now = time.monotonic()
            if stop.is_set():
                deadline.shorten(self._settings.worker_shutdown_timeout, now)
            if now > deadline.end_at:
                break
            if now > deadline.hand_back_at and not handed_back:
                log.warning("not every request finished in time: the others are returned to their gateways")
                loop.hand_back()
                handed_back = True
            await asyncio.sleep(0.05)
        return 0

    async def _close(self) -> None:
        """Wait for the running step, without blocking signals; exit without one that never ends."""
        closing = asyncio.create_task(asyncio.to_thread(self._loop.close))
        if not (await asyncio.wait((closing,), timeout=CLOSE_S))[0]:
            log.error("the running step does not end: exiting without it")
            self._engine.yield_cores()  # else workers that share its cores would wait for it
            leave(1)
        await closing

    def _send_heartbeat(self) -> work_pb2.Load:
        load = self._spec.load()
        load.busy_share = self._busy.share(time.monotonic())
        self._spec.gateways.heartbeat(heartbeat(self._loop, load, self._becomes))
        return load

    def _not_ready_reason(self) -> str:
        """Return the reason why the worker takes no requests, in a line; empty if it does."""
        if self._publisher is not None and self._publisher.replaced:
            return "another process has its worker id"
        return "draining" if self._loop.draining else ""

    async def _send_heartbeats(self) -> None:
        """Send the engine's progress, or how late its step is, and its load to gateways and directory."""
        while True:
            self._spec.gateways.tick()
            load = self._send_heartbeat()
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
    """Wait for one of the events, and return 0, or for the end of a task that should never end: 1."""
    signals = [asyncio.create_task(event.wait()) for event in (stop, drain)]
    await asyncio.wait([*signals, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for signal in signals:
        signal.cancel()
    if stop.is_set() or drain.is_set():
        return 0
    _ended(tasks)
    return 1


def _ended(tasks: Sequence[asyncio.Task[None]]) -> bool:
    """Return whether one of these tasks, which should never end, has, and log why."""
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
