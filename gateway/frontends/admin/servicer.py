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
from diptych.runtime.gateway_metrics import GatewayMetrics
from diptych.runtime.rpc import add_health_and_reflection, bind, make_server
from diptych.v1 import admin_pb2 as pb
from gateway.call import Calls
from gateway.frontends.admin.adapter_operations import AdapterOperations
from gateway.frontends.admin.live_load import add_load
from gateway.frontends.admin.model_operations import ModelOperations, described
from gateway.frontends.admin.worker_status import other_models, worker_status
from gateway.frontends.grpc.grpc_service import Body, GrpcCall, add_service, plain
from gateway.served_models.core import ModelCore
from gateway.served_models.directory import ModelDirectory
from gateway.served_models.service import ModelService
from gateway.session.live_requests import LiveRequests
from gateway.worker_pool.registry import Worker

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
    config_digest: str
    started_ns: int  # Unix time


class Operations:
    """RPCs of the service; one object serves all calls.

    Args:
        models: operations on them.
        state: returns (ready, draining, directory connected) as they are now.
    """

    def __init__(
        self,
        models: ModelService,
        live: LiveRequests,
        metrics: GatewayMetrics,
        identity: Identity,
        state: Callable[[], tuple[bool, bool, bool]],
    ) -> None:
        self.models = ModelOperations(models)
        self.adapters = AdapterOperations(models.models)
        self._models: ModelDirectory = models.models
        self._live = live
        self._metrics = metrics
        self._identity = identity
        self._state = state

    async def server_info(self, _: pb.GetServerInfoRequest) -> pb.GetServerInfoResponse:
        ready, draining, connected = self._state()
        first = self._models.first
        info = pb.GetServerInfoResponse(
            version=__version__,
            gateway_id=self._identity.gateway_id,
            model=first.name,
            model_digest=first.digest,
            config_digest=self._identity.config_digest,
            max_context_length=first.model.card.max_context,
            kv_block_size=first.worker_pool.registry.block_size() or 0,
            ready=ready,
            draining=draining,
            directory_connected=connected,
            models=described(self._models),
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
        queues = [core.gate.queue for core in self._models.living]
        message = pb.WatchLoadResponse(
            running=sum(queue.running for queue in queues),
            waiting=sum(queue.waiting for queue in queues),
            workers=self._status(),
        )
        add_load(message, self._live, self._metrics)
        return message

    async def drain_worker(self, request: pb.DrainWorkerRequest) -> pb.DrainWorkerResponse:
        """Send the worker the order. If it is lost before it reads it, it takes nothing new either."""
        worker = _linked(self._find(request.worker_id)[1])
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
        core, worker = self._find(request.worker_id)
        if worker.record.role == role:
            return pb.ChangeWorkerRoleResponse(changed=False)
        await core.roles.change(_linked(worker).record.worker_id, grace_s)
        return pb.ChangeWorkerRoleResponse(changed=True)

    async def flush_prefix_cache(self, request: pb.FlushPrefixCacheRequest) -> pb.FlushPrefixCacheResponse:
        """Flush the cache of one worker, or of all that are linked, and count the blocks."""
        if request.worker_id:
            core, worker = self._find(request.worker_id)
            chosen = [(core, _linked(worker))]
        else:
            chosen = [
                (core, worker)
                for core in self._models.living
                for worker in core.worker_pool.registry.linked()
            ]
        counts = await asyncio.gather(*(_flush(core, worker) for core, worker in chosen))
        return pb.FlushPrefixCacheResponse(blocks=sum(counts))

    def _status(self) -> list[pb.WorkerInfo]:
        now, clock = asyncio.get_running_loop().time(), time.monotonic()
        infos = other_models(self._models.first.worker_pool.other_models())
        for core in self._models.living:
            slow = partial(core.worker_pool.ejections.reason, now=clock)
            names = {adapter.digest: adapter.name for adapter in core.adapters}
            infos += worker_status(core.worker_pool.registry, now, slow, names, core.name)
        return sorted(infos, key=lambda info: (info.role, info.worker_id))

    def _find(self, worker_id: str) -> tuple[ModelCore, Worker]:
        if not worker_id:
            raise InvalidParameter("worker_id", "is required")
        for core in self._models.living:
            if (worker := core.worker_pool.registry.get(worker_id)) is not None:
                return core, worker
        raise UnknownWorker(worker_id)


def _linked(worker: Worker) -> Worker:
    if not worker.link.up:
        raise NoReadyWorker(worker.record.role)
    return worker


async def _flush(core: ModelCore, worker: Worker) -> int:
    number, answer = core.worker_pool.pending_flushes.add(worker.record.worker_id)
    worker.link.send(worker.link.codec.build_flush(number))
    try:
        return await asyncio.wait_for(answer, FLUSH_TIMEOUT_S)
    except TimeoutError:
        raise NoReadyWorker(worker.record.role) from None


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
        "LoadAdapter": _about("name", operations.adapters.load_adapter),
        "UnloadAdapter": _about("name", operations.adapters.unload_adapter),
        "ListAdapters": plain(operations.adapters.list_adapters),
        "LoadModel": _about("name", operations.models.load_model),
        "UnloadModel": _about("name", operations.models.unload_model),
        "ListServedModels": plain(operations.models.list_served_models),
        "SetModelAlias": _about("alias", operations.models.set_model_alias, lambda alias: alias.name),
    }


def _about(
    field: str, body: Callable[[Any], Awaitable[Message]], name: Callable[[Any], str] = lambda value: value
) -> Body:
    """Make an RPC of a function, whose record has this field of the request, or its name, as its target."""

    def run(request: Any, call: GrpcCall) -> Awaitable[Message]:
        call.target = name(getattr(request, field))
        return body(request)

    return run
