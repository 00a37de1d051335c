"""`diptych.v1.AdminService`: its RPCs as functions of messages, and its server on a port of its own.

The server has health and reflection of its own. RPCs raise `DiptychError`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from diptych import __version__
from diptych.runtime.descriptors import connection_limits
from diptych.runtime.errors import InvalidParameter, NoReadyWorker, UnknownWorker
from diptych.runtime.metrics import GatewayMetrics
from diptych.runtime.rpc import add_health_and_reflection, bind, make_server
from diptych.v1 import admin_pb2 as pb
from gateway.adapter_service import AdapterService
from gateway.adapters.adapter import Adapter
from gateway.admission.queue import AdmissionQueue
from gateway.call import Calls
from gateway.frontends.admin.live_load import add_load
from gateway.frontends.admin.worker_status import worker_status
from gateway.frontends.grpc.grpc_service import Body, GrpcCall, add_service, plain
from gateway.model.served_model import ModelCard
from gateway.session.live_requests import LiveRequests
from gateway.worker_pool.registry import Worker
from gateway.worker_pool.role_changes import RoleChanges
from gateway.worker_pool.worker_pool import WorkerPool

FLUSH_TIMEOUT_S = 5.0
DEFAULT_INTERVAL_S = 1.0
MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 3600.0
MAX_GRACE_S = 24 * 3600.0
_ROLES = {pb.WORKER_ROLE_PREFILL: "prefill", pb.WORKER_ROLE_DECODE: "decode"}


@dataclass(frozen=True, slots=True)
class Identity:
    """Facts about a gateway that do not change."""

    gateway_id: str
    card: ModelCard
    model_digest: str
    config_digest: str
    started_ns: int  # Unix time


class Operations:
    """RPCs of the service; one object serves all calls.

    Args:
        adapters: operations on them.
        roles: changes of the workers' roles.
        state: returns (ready, draining, directory connected) as they are now.
    """

    def __init__(
        self,
        fleet: WorkerPool,
        queue: AdmissionQueue,
        live: LiveRequests,
        metrics: GatewayMetrics,
        identity: Identity,
        state: Callable[[], tuple[bool, bool, bool]],
        adapters: AdapterService,
        roles: RoleChanges,
    ) -> None:
        self._adapters = adapters
        self._roles = roles
        self._fleet = fleet
        self._queue = queue
        self._live = live
        self._metrics = metrics
        self._identity = identity
        self._state = state

    async def server_info(self, _: pb.GetServerInfoRequest) -> pb.GetServerInfoResponse:
        ready, draining, connected = self._state()
        card = self._identity.card
        info = pb.GetServerInfoResponse(
            version=__version__,
            gateway_id=self._identity.gateway_id,
            model=card.name,
            model_digest=self._identity.model_digest,
            config_digest=self._identity.config_digest,
            max_context_length=card.max_context,
            kv_block_size=self._fleet.registry.block_size() or 0,
            ready=ready,
            draining=draining,
            directory_connected=connected,
        )
        info.start_time.FromNanoseconds(self._identity.started_ns)
        return info

    async def list_workers(self, _: pb.ListWorkersRequest) -> pb.ListWorkersResponse:
        return pb.ListWorkersResponse(workers=self._status())

    async def watch_load(self, request: pb.WatchLoadRequest, call: GrpcCall) -> None:
        """Write the load until the caller leaves: its cancel comes as CancelledError."""
        interval_s = DEFAULT_INTERVAL_S
        if request.HasField("interval"):
            interval_s = _seconds("interval", request.interval, MIN_INTERVAL_S, MAX_INTERVAL_S)
        while True:
            await call.context.write(self.load())
            await asyncio.sleep(interval_s)

    def load(self) -> pb.WatchLoadResponse:
        """Return the gateway's load now."""
        message = pb.WatchLoadResponse(
            running=self._queue.running, waiting=self._queue.waiting, workers=self._status()
        )
        add_load(message, self._live, self._metrics)
        return message

    async def drain_worker(self, request: pb.DrainWorkerRequest) -> pb.DrainWorkerResponse:
        """Send the worker the order. If it is lost before it reads it, it takes nothing new either."""
        worker = self._linked(self._find(request.worker_id))
        grace_s = None
        if request.HasField("grace"):
            grace_s = _seconds("grace", request.grace, 0.0, MAX_GRACE_S)
        worker.link.send(worker.link.codec.build_drain(grace_s))
        return pb.DrainWorkerResponse()

    async def change_worker_role(self, request: pb.ChangeWorkerRoleRequest) -> pb.ChangeWorkerRoleResponse:
        """Let a worker be started in the other role; answer when it has the order."""
        role = _ROLES.get(request.role)
        if role is None:
            raise InvalidParameter("role", "must be WORKER_ROLE_PREFILL or WORKER_ROLE_DECODE")
        grace_s = None
        if request.HasField("grace"):
            grace_s = _seconds("grace", request.grace, 0.0, MAX_GRACE_S)
        worker = self._find(request.worker_id)
        if worker.record.role == role:
            return pb.ChangeWorkerRoleResponse(changed=False)
        await self._roles.change(self._linked(worker).record.worker_id, grace_s)
        return pb.ChangeWorkerRoleResponse(changed=True)

    async def flush_prefix_cache(self, request: pb.FlushPrefixCacheRequest) -> pb.FlushPrefixCacheResponse:
        """Flush the cache of one worker, or of all that are linked, and count the blocks."""
        if request.worker_id:
            chosen = [self._linked(self._find(request.worker_id))]
        else:
            chosen = list(self._fleet.registry.linked())
        counts = await asyncio.gather(*(self._flush(worker) for worker in chosen))
        return pb.FlushPrefixCacheResponse(blocks=sum(counts))

    async def load_adapter(self, request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
        """Serve an adapter once all linked workers have it."""
        adapter = await self._adapters.load(request.name, request.path, replace=request.replace)
        return pb.LoadAdapterResponse(adapter=self._adapter(adapter))

    async def unload_adapter(self, request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
        """Serve an adapter no more, and answer when workers have forgotten it."""
        await self._adapters.unload(request.name)
        return pb.UnloadAdapterResponse()

    async def list_adapters(self, _: pb.ListAdaptersRequest) -> pb.ListAdaptersResponse:
        served = [self._adapter(adapter) for adapter in self._adapters.served()]
        leaving = [self._adapter(adapter, draining=True) for adapter in self._adapters.leaving()]
        return pb.ListAdaptersResponse(adapters=[*served, *leaving])

    def _adapter(self, adapter: Adapter, *, draining: bool = False) -> pb.Adapter:
        return pb.Adapter(
            name=adapter.name,
            digest=adapter.digest.hex(),
            path=adapter.path,
            rank=adapter.rank,
            workers=self._adapters.workers_with(adapter),
            running=self._adapters.running(adapter),
            draining=draining,
            refusals=self._adapters.refusals(adapter),
        )

    async def _flush(self, worker: Worker) -> int:
        number, answer = self._fleet.pending_flushes.add(worker.record.worker_id)
        worker.link.send(worker.link.codec.build_flush(number))
        try:
            return await asyncio.wait_for(answer, FLUSH_TIMEOUT_S)
        except TimeoutError:
            raise NoReadyWorker(worker.record.role) from None

    def _status(self) -> list[pb.WorkerInfo]:
        now = asyncio.get_running_loop().time()
        slow = partial(self._fleet.ejections.reason, now=time.monotonic())
        names = {adapter.digest: adapter.name for adapter in self._adapters.served()}
        return worker_status(self._fleet.registry, self._fleet.other_models(), now, slow, names)

    def _find(self, worker_id: str) -> Worker:
        if not worker_id:
            raise InvalidParameter("worker_id", "is required")
        for worker in self._fleet.registry:
            if worker.record.worker_id == worker_id:
                return worker
        raise UnknownWorker(worker_id)

    def _linked(self, worker: Worker) -> Worker:
        if not worker.link.up:
            raise NoReadyWorker(worker.record.role)
        return worker


def started_now() -> int:
    """Return the time for `Identity.started_ns`."""
    return time.time_ns()


def _seconds(field: str, duration: Duration, least: float, most: float) -> float:
    seconds = duration.seconds + duration.nanos * 1e-9
    if not least <= seconds <= most:
        raise InvalidParameter(field, f"must be from {least:g} s to {most:g} s")
    return seconds


DESCRIPTOR = pb.DESCRIPTOR.services_by_name["AdminService"]
MAX_REQUEST_BYTES = 64 * 1024


class AdminServicer:
    """Server of the service until it is closed. It is always ready: operators come when things go wrong."""

    def __init__(self, server: grpc.aio.Server, port: int) -> None:
        self._server = server
        self.port = port

    @classmethod
    async def start(
        cls,
        host: str,
        port: int,
        calls: Calls,
        operations: Operations,
        *,
        insecure: bool,
        credentials: grpc.ServerCredentials | None = None,
        share_port: bool = False,
    ) -> AdminServicer:
        """Bind (0 = any free port) and serve. Raises OSError or UnsafeBindError."""
        server = make_server(
            internal=False,
            max_message_bytes=MAX_REQUEST_BYTES,
            share_port=share_port,
            max_connections=connection_limits().admin,
        )
        add_service(server, calls, DESCRIPTOR, bodies(operations))
        health = await add_health_and_reflection(server, [DESCRIPTOR.full_name])
        bound = bind(server, host, port, insecure, credentials)
        await server.start()
        await health.set_ready(True)
        return cls(server, bound)

    async def close(self) -> None:
        await self._server.stop(grace=0.2)


def bodies(operations: Operations) -> dict[str, Body]:
    """Return every RPC of the service by name."""
    return {
        "GetServerInfo": plain(operations.server_info),
        "ListWorkers": plain(operations.list_workers),
        "WatchLoad": operations.watch_load,
        "DrainWorker": _about("worker_id", operations.drain_worker),
        "ChangeWorkerRole": _about("worker_id", operations.change_worker_role),
        "FlushPrefixCache": _about("worker_id", operations.flush_prefix_cache),
        "LoadAdapter": _about("name", operations.load_adapter),
        "UnloadAdapter": _about("name", operations.unload_adapter),
        "ListAdapters": plain(operations.list_adapters),
    }


def _about(field: str, body: Callable[[Any], Awaitable[Message]]) -> Body:
    """Make an RPC of a function, whose record has this field of the request as its target."""

    def run(request: Any, call: GrpcCall) -> Awaitable[Message]:
        call.target = getattr(request, field)
        return body(request)

    return run
