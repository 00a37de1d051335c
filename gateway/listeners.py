"""Ports of a gateway: the public gRPC one, HTTP's, and the operators'."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

import grpc
from prometheus_client import CollectorRegistry

from diptych.runtime.bind_address import is_loopback
from diptych.runtime.gateway_metrics import GatewayMetrics
from diptych.runtime.http_edge import HttpEdge
from diptych.runtime.rpc import Health, add_health_and_reflection, bind, make_server
from diptych.runtime.settings import StartupError
from diptych.runtime.tls import TlsFiles
from gateway import limits
from gateway.access.access import Access
from gateway.call import Calls
from gateway.config import GatewaySettings
from gateway.frontends.admin.servicer import AdminServicer, Operations
from gateway.frontends.batches.service import Batches, BatchSettings
from gateway.frontends.grpc.inference_service import SERVICE, add_inference_service
from gateway.frontends.kserve.servicer import SERVICE as KSERVE_SERVICE
from gateway.frontends.kserve.servicer import KServeServicer
from gateway.frontends.kserve_http.routes import KServeRoutes
from gateway.frontends.openai.adapter_routes import AdapterRoutes
from gateway.frontends.openai.fallback import Fallback
from gateway.frontends.openai.routes import OpenAIRoutes
from gateway.frontends.status.routes import StatusRoutes
from gateway.served_models.router import ModelRouter
from gateway.setting_types import listed

SHUT_DOWN_S = 0.5  # for the last statuses to reach their clients


class Readiness(Protocol):
    """State of a gateway as its ports show it."""

    @property
    def ready(self) -> bool: ...
    def why_not_ready(self) -> str: ...
    def gives_work(self, worker_id: str) -> bool: ...
    def lacks(self, model: str) -> str: ...


@dataclass(frozen=True)
class ServedParts:
    """Parts of a gateway that its ports offer.

    Args:
        calls: of clients.
        admin_calls: of operators, on the HTTP port and on their own.
    """

    router: ModelRouter
    calls: Calls
    admin_calls: Calls
    access: Access
    operations: Operations
    registry: CollectorRegistry
    metrics: GatewayMetrics


class Listeners:
    """Open ports of a gateway: `open`, `leave`, `close`."""

    def __init__(self, settings: GatewaySettings, parts: ServedParts, state: Readiness) -> None:
        self._settings = settings
        self._parts = parts
        self._state = state
        self._server: grpc.aio.Server | None = None
        self._http: HttpEdge | None = None
        self._admin: AdminServicer | None = None
        self._stopping: asyncio.Task[None] | None = None
        self.batches: Batches | None = None
        self._fallback = _fallback(settings, parts)
        self.grpc_port = self.http_port = self.admin_port = 0

    async def open(self) -> Health:
        """Bind all ports and serve; return the health service. Raises as `Gateway.start`."""
        settings, parts = self._settings, self._parts
        images = any(core.model.images is not None for core in parts.router.models)
        image_bytes = settings.max_image_mib << 20 if images else 0
        server = make_server(
            internal=False,
            max_message_bytes=limits.MAX_MESSAGE_BYTES + image_bytes,
            share_port=settings.reuse_port,
        )
        add_inference_service(server, parts.calls, parts.router)
        KServeServicer(parts.calls, parts.router, lambda: self._state.ready).register(server)
        health = await add_health_and_reflection(server, [SERVICE, KSERVE_SERVICE])
        credentials = _credentials(settings.tls)
        self.grpc_port = bind(server, settings.host, settings.grpc_port, settings.insecure, credentials)
        await self._open_http(limits.MAX_BODY_BYTES + image_bytes * 4 // 3)
        self._admin = await AdminServicer.start(
            settings.host,
            settings.resolved_admin_port,
            parts.admin_calls,
            parts.operations,
            insecure=settings.insecure,
            credentials=_credentials(settings.tls),
            share_port=settings.reuse_port,
        )
        self.admin_port = self._admin.port
        self._server = server
        await server.start()
        return health

    async def _open_http(self, body_bytes: int) -> None:
        settings, state = self._settings, self._state
        self._http = await HttpEdge.start(
            settings.host,
            settings.http_port,
            registry=self._parts.registry,
            ready=lambda: state.ready,
            why_not_ready=state.why_not_ready,
            gives_work=state.gives_work,
            lacks=state.lacks,
            tls=settings.tls,
            insecure=settings.insecure,
            api=self._http_api(body_bytes),
            max_body_bytes=body_bytes,
            share_port=settings.reuse_port,
            config_digest=settings.digest,
        )
        self.http_port = self._http.port

    def _http_api(self, body_bytes: int) -> OpenAIRoutes:
        """Return the HTTP API, with batches where there is a folder for them. Raises StartupError."""
        settings, parts = self._settings, self._parts
        operations, closed = parts.operations, self._closed_to_operators
        kserve = KServeRoutes(parts.calls, parts.router, lambda: self._state.ready, body_bytes)
        status = StatusRoutes(parts.admin_calls, operations.server_info, operations.load, closed=closed)
        api = OpenAIRoutes(
            parts.calls,
            parts.router,
            listed(settings.cors_allow_origin),
            AdapterRoutes(parts.admin_calls, parts.router.models, closed=closed),
            operators=status.routes,
            others=kserve.methods,
            max_body_bytes=body_bytes,
            fallback=self._fallback,
        )
        if settings.batch_dir is not None:
            bounds = BatchSettings(
                settings.batch_dir,
                settings.batch_concurrency,
                settings.batch_max_file_mib,
                settings.batch_max_total_mib,
                settings.batch_keep_days,
            )
            try:
                self.batches = Batches(bounds, parts.calls, parts.access, api.generation, api.readers)
            except OSError as error:
                raise StartupError(f"--batch-dir: {error}") from None
            api.batches = self.batches.routes
        return api

    @property
    def _closed_to_operators(self) -> bool:
        """True where every caller of the HTTP port would be an operator: no key, and more than loopback."""
        return self._parts.access.open and not is_loopback(self._settings.host)

    def next_request_s(self) -> float:
        """Return how long an HTTP client that has an answer may still take to send its next request."""
        return 0.0 if self._http is None else self._http.next_request_s()

    async def leave(self) -> None:
        """Stop listening, and serve what is connected; the operators' port stays."""
        if self._http is not None:
            await self._http.leave()
        if self._server is not None:
            grace = self._settings.shutdown_timeout + SHUT_DOWN_S
            self._stopping = asyncio.create_task(self._server.stop(grace), name="stop listening")
            await asyncio.sleep(0)  # it has begun before the running calls are counted

    async def close_grpc(self) -> None:
        """End all RPCs of clients."""
        if self._server is not None:
            await self._server.stop(grace=SHUT_DOWN_S)

    async def close(self) -> None:
        """Close HTTP's and the operators' port."""
        if self._http is not None:
            await self._http.close()
        if self._admin is not None:
            await self._admin.close()
        if self._fallback is not None:
            await self._fallback.close()


def _fallback(settings: GatewaySettings, parts: ServedParts) -> Fallback | None:
    """Return the other server, where there is one. Raises StartupError for a key that cannot be read."""
    if settings.fallback_url is None:
        return None
    key = ""
    if (path := settings.fallback_key_file) is not None:
        try:
            key = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"--fallback-key-file: {path} cannot be read: {error}") from None

    def count(status: int) -> None:
        parts.metrics.fallback_answers.labels(str(status)).inc()

    return Fallback(settings.fallback_url, key, settings.fallback_model, count)


def _credentials(tls: TlsFiles | None) -> grpc.ServerCredentials | None:
    return None if tls is None else tls.server_credentials()
