"""Assembly of the gateway: its components, their start and the order of its shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING

import grpc
from prometheus_client import CollectorRegistry

from diptych.runtime.bind_address import is_loopback
from diptych.runtime.discovery.mirror import DirectoryMirror
from diptych.runtime.discovery.quota_table import QuotaTableStore
from diptych.runtime.discovery.role_lease import RoleLease
from diptych.runtime.discovery.worker_file import WorkerFileReader
from diptych.runtime.heap_trim import HeapTrim
from diptych.runtime.http_edge import HttpEdge
from diptych.runtime.metrics import GatewayMetrics, new_registry
from diptych.runtime.model_digest import model_digest
from diptych.runtime.model_files import checked_model
from diptych.runtime.process import incarnation
from diptych.runtime.rpc import Health, add_health_and_reflection, bind, make_server
from diptych.runtime.settings import StartupError
from diptych.runtime.telemetry import Telemetry
from diptych.runtime.tls import TlsFiles
from gateway import limits
from gateway.access.access import Access
from gateway.access.journal import Journal
from gateway.access.key_file import Scope
from gateway.adapter_metrics import AdapterMetrics, VllmLoraMetrics
from gateway.adapter_service import AdapterService, read_configured
from gateway.adapters.registry import AdapterRegistry
from gateway.admission.gate import AdmissionGate
from gateway.admission.memory_quota import MemoryQuota
from gateway.admission.queue import AdmissionQueue
from gateway.admission.wait import MaxQueueDelay
from gateway.attempt.types import Role
from gateway.call import Calls
from gateway.config import GatewaySettings, listed
from gateway.frontends.admin.servicer import AdminServicer, Identity, Operations, started_now
from gateway.frontends.batches.service import Batches, BatchSettings
from gateway.frontends.grpc.inference_service import SERVICE, add_inference_service
from gateway.frontends.kserve.servicer import SERVICE as KSERVE_SERVICE
from gateway.frontends.kserve.servicer import KServeServicer
from gateway.frontends.openai.adapter_routes import AdapterRoutes
from gateway.frontends.openai.routes import OpenAIRoutes
from gateway.frontends.status.routes import StatusRoutes
from gateway.generate import Generator
from gateway.images.decoder import ImageDecoder
from gateway.images.intake import ImageIntake, ImageLimits
from gateway.model.served_model import ServedModel
from gateway.model.template_file import read_template
from gateway.request.resume_token import ResumeTokens
from gateway.request_parser import RequestParser
from gateway.request_telemetry import create_series
from gateway.session.live_requests import LiveRequests
from gateway.session.retry_policy import RetryBudget, RetryLimits
from gateway.slow_readers import ReaderLimits, UnreadOutput, create_reader_series
from gateway.tokenizer_pool import TokenizerPool
from gateway.tokenizer_service import TokenizerService
from gateway.vllm_metrics import VllmMetrics
from gateway.worker_pool.auto_roles import AutoRoles, RoleMetrics
from gateway.worker_pool.load_metrics import LoadMetrics
from gateway.worker_pool.local_prefill import LocalMode
from gateway.worker_pool.role_changes import RoleChanges
from gateway.worker_pool.role_demand import SloTargets
from gateway.worker_pool.role_rules import RoleBounds
from gateway.worker_pool.worker_pool import GatewayIdentity, WorkerPool

if TYPE_CHECKING:
    from gateway.access.jwks import FileKeys, UrlKeys
    from gateway.access.token_verifier import TokenVerifier

SHUT_DOWN_S = 0.5  # for the last statuses to reach their clients
_log = logging.getLogger(__name__)


class Gateway:
    """Gateway of this process: `start`, serve, `drain`, `close`."""

    def __init__(
        self, settings: GatewaySettings, model: ServedModel, digest: str, *, incarnation_id: int | None = None
    ) -> None:
        """Create all components. ``incarnation_id`` tells gateways of one process apart; default: its own."""
        self._settings = settings
        self._model = model
        self._digest = digest
        self.registry: CollectorRegistry = new_registry()
        self.metrics = GatewayMetrics(self.registry)
        create_series(self.metrics)
        create_reader_series(self.metrics)
        try:
            self._journal = Journal(self.registry, settings.access_log, settings.worker_id)
        except OSError as error:
            raise StartupError(f"--access-log: {error}") from None
        self.telemetry = Telemetry.start("diptych-gateway", settings.worker_id)
        self.live = LiveRequests()
        self.mirror = DirectoryMirror(settings.redis_url)
        identity = GatewayIdentity(
            settings.worker_id, incarnation_id or incarnation(), digest, settings.secret_bytes
        )
        self._changed = asyncio.Event()
        self.adapters = AdapterRegistry(model.card)
        self.worker_pool = WorkerPool(
            self.mirror,
            self.live,
            identity,
            clock=time.monotonic,
            on_change=self._workers_changed,
            arrival_wait_s=settings.worker_wait_timeout,
            local_workers=WorkerFileReader(settings.workers_fd).workers,
            local_prefill=LocalMode(settings.local_prefill),
            needed_adapters=lambda: self.adapters.needed,
            tls=settings.link_tls,
        )
        self.adapter_service = AdapterService(
            self.adapters,
            self.worker_pool.adapter_loads,
            settings.max_lora_rank,
            settings.redis_url,
            digest,
            self.metrics.forget_model,
        )
        self.roles = RoleChanges(
            self.worker_pool.registry,
            RoleLease(settings.redis_url, digest),
            time.monotonic,
            pause_s=settings.auto_roles_pause_s,
        )
        delay_s = settings.max_queue_delay_s
        max_delay = MaxQueueDelay(seconds=None if delay_s == "auto" else delay_s)
        verifier, self._token_keys = _tokens(settings)
        self._access = Access(settings.api_keys_file, verifier)
        self.gate = AdmissionGate(
            AdmissionQueue(
                settings.max_inflight,
                settings.max_queued_tokens,
                max_delay=max_delay,
                tenants=self._access.tenants,
            ),
            time.monotonic,
        )
        self.auto_roles = AutoRoles(
            self.worker_pool.registry,
            self.gate.queue,
            self.roles,
            SloTargets(settings.slo_ttft_ms / 1000, settings.slo_itl_ms / 1000),
            RoleBounds(settings.min_prefill_workers, settings.min_decode_workers),
            time.monotonic,
        )
        self._quota = MemoryQuota(self.gate, QuotaTableStore(settings.redis_url, digest, settings.worker_id))
        reader_limits = ReaderLimits(
            settings.write_timeout, settings.stream_buffer_mib << 20, settings.total_stream_buffer_mib << 20
        )
        self._heap = HeapTrim()
        self.unread_output = UnreadOutput(reader_limits, self.metrics, self._heap)
        self.tokenizer_pool = TokenizerPool()
        tokens = ResumeTokens(settings.secret_bytes, digest, wall_clock=time.time)
        images = image_intake(model, settings)
        self.request_parser = RequestParser(
            model,
            self.tokenizer_pool,
            tokens,
            time.monotonic,
            images,
            lenient_json_schema=settings.lenient_json_schema,
        )
        self.generator = Generator(
            model,
            self.worker_pool,
            self.live,
            self.gate,
            self.request_parser,
            self.unread_output,
            tokens=tokens,
            retry_limits=RetryLimits(RetryBudget(settings.max_inflight), settings.worker_wait_timeout),
            telemetry=self.telemetry,
            metrics=self.metrics,
            clock=time.monotonic,
            adapters=self.adapters,
        )
        self._tokenizer_service = TokenizerService(
            model,
            self.adapters,
            self.live,
            self.tokenizer_pool,
            token_limit=self.worker_pool.registry.token_limit,
            block_size=self.worker_pool.registry.block_size,
            images=images,
        )
        self.calls = self._calls(Scope.INFERENCE)
        self._server: grpc.aio.Server | None = None
        self._health: Health | None = None
        self._http: HttpEdge | None = None
        self._admin: AdminServicer | None = None
        self._batches: Batches | None = None
        self._watch: asyncio.Task[None] | None = None
        self._shutting_down = False
        self._stopping: asyncio.Task[None] | None = None
        self.grpc_port = 0
        self.http_port = 0
        self.admin_port = 0

    @property
    def ready(self) -> bool:
        """True if a request that comes now has workers to run on."""
        return not self.why_not_ready()

    def why_not_ready(self) -> str:
        """Return the reason in a line; empty while the gateway is ready."""
        if self._shutting_down:
            return "shutting down"
        why, outage = self.worker_pool.registry.why_not_ready(), self.mirror.outage
        return f"{why}; {outage}" if why and outage else why

    def _gives_work(self, worker_id: str) -> bool:
        return any(
            w.record.worker_id == worker_id and w.accepts_work for w in self.worker_pool.registry.linked()
        )

    async def start(self) -> None:
        """Bind all ports and serve. Raises CannotListen, UnsafeBindError or, for --lora, StartupError."""
        settings = self._settings
        self.adapter_service.start(read_configured(settings.adapters, settings.max_lora_rank))
        await self.mirror.start()
        self.worker_pool.start()
        self._quota.start()
        if settings.auto_roles:
            self.auto_roles.start()
        await self._workers_or_timeout(settings.await_workers_s)
        share, tls = settings.reuse_port, settings.tls
        image_bytes = settings.max_image_mib << 20 if self._model.images is not None else 0
        message_bytes = limits.MAX_MESSAGE_BYTES + image_bytes
        body_bytes = limits.MAX_BODY_BYTES + image_bytes * 4 // 3
        server = make_server(internal=False, max_message_bytes=message_bytes, share_port=share)
        calls = self.calls
        add_inference_service(server, calls, self.generator, self._tokenizer_service)
        KServeServicer(calls, self.generator, self.adapters, lambda: self.ready).register(server)
        self._health = await add_health_and_reflection(server, [SERVICE, KSERVE_SERVICE])
        self.grpc_port = bind(server, settings.host, settings.grpc_port, settings.insecure, _credentials(tls))
        self._bind_gauges()
        self._http = await HttpEdge.start(
            settings.host,
            settings.http_port,
            registry=self.registry,
            ready=lambda: self.ready,
            why_not_ready=self.why_not_ready,
            gives_work=self._gives_work,
            tls=tls,
            insecure=settings.insecure,
            api=self._http_api(calls, body_bytes),
            max_body_bytes=body_bytes,
            share_port=share,
            config_digest=settings.digest,
        )
        self.http_port = self._http.port
        self._admin = await AdminServicer.start(
            settings.host,
            settings.resolved_admin_port,
            self._calls(Scope.ADMIN),
            self._operations,
            insecure=settings.insecure,
            credentials=_credentials(tls),
            share_port=share,
        )
        self.admin_port = self._admin.port
        self._server = server
        await server.start()
        self._watch = asyncio.create_task(self._watch_readiness(self._health), name="readiness")
        if self._batches is not None:
            self._batches.start()

    def _http_api(self, calls: Calls, body_bytes: int) -> OpenAIRoutes:
        """Return the HTTP API, with batches where there is a folder for them. Raises StartupError."""
        settings = self._settings
        api = OpenAIRoutes(
            calls,
            self.generator,
            self._tokenizer_service,
            self._model,
            self._digest,
            listed(settings.cors_allow_origin),
            self._adapter_routes(),
            operators=self._status_routes().routes,
            max_body_bytes=body_bytes,
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
                self._batches = Batches(bounds, calls, self._access, api.generation, api.readers)
            except OSError as error:
                raise StartupError(f"--batch-dir: {error}") from None
            api.batches = self._batches.routes
        return api

    async def drain(self) -> None:
        """Refuse new requests, let the running ones finish within the grace period, then fail the rest.

        Where a successor shares the ports nothing is refused: the listeners close, gRPC clients get a GOAWAY,
        and requests over an old connection are still served.
        """
        self._shutting_down = True
        self._changed.set()
        await self.auto_roles.close()
        if self._batches is not None:
            await self._batches.stop()
        if self._health is not None:
            await self._health.set_ready(False)
        await asyncio.sleep(self._settings.lame_duck)
        if self._settings.reuse_port:
            await self._stop_listening()
        else:
            self.generator.draining = True
            self.worker_pool.arrivals.release()
        try:
            await asyncio.wait_for(self._all_answered(), self._settings.shutdown_timeout)
        except TimeoutError:
            if self.calls.running:  # else it waited for requests that might still come
                _log.warning("%d calls outlived the grace period", self.calls.running)
                self.live.shut_down()

    async def _all_answered(self) -> None:
        """Wait for all calls: also for waiting texts and grammars and for answers being written.

        An HTTP client with a recent answer may have sent its next request before it sees the connection
        close.
        """
        await self.calls.idle()
        while self._http is not None and (seconds := self._http.next_request_s()) > 0:
            await asyncio.sleep(seconds)
            await self.calls.idle()

    async def _stop_listening(self) -> None:
        if self._http is not None:
            await self._http.leave()
        if self._server is not None:
            grace = self._settings.shutdown_timeout + SHUT_DOWN_S
            self._stopping = asyncio.create_task(self._server.stop(grace), name="stop listening")
            await asyncio.sleep(0)  # it has begun before the running calls are counted

    async def _workers_or_timeout(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.worker_pool.registry.missing_role() is not None:
                    self._changed.clear()
                    await self._changed.wait()

    async def close(self) -> None:
        """Stop at once; call `drain` first for a graceful shutdown."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        if self._batches is not None:
            await self._batches.stop()
        if self._server is not None:
            await self._server.stop(grace=SHUT_DOWN_S)
        await self.adapter_service.close()
        await self._quota.close()
        await self.auto_roles.close()
        await self.roles.close()
        await self.worker_pool.close()
        await self.request_parser.close()
        self.tokenizer_pool.close()
        await self.mirror.close()
        if self._http is not None:
            await self._http.close()
        if self._admin is not None:
            await self._admin.close()
        await asyncio.to_thread(self.telemetry.stop)
        await asyncio.to_thread(self._journal.close)
        if self._token_keys is not None:
            self._token_keys.close()

    def _workers_changed(self) -> None:
        self._changed.set()
        self.gate.resize(self.worker_pool.registry.capacity())

    async def _watch_readiness(self, health: Health) -> None:
        """Set the health status: SERVING while a matching prefill and decode worker are connected."""
        logged: str | None = None
        while True:
            self._changed.clear()
            why = self.why_not_ready()
            status = f"not ready: {why}" if why else "ready"
            if status != logged:
                logged = status
                _log.info(status)
                await health.set_ready(status == "ready")
            await self._changed.wait()

    def _calls(self, scope: Scope) -> Calls:
        return Calls(
            self.telemetry,
            self.metrics,
            time.monotonic,
            self._access,
            scope,
            alive=self.live.is_reserved,
            write_timeout_s=self._settings.write_timeout,
            heap=self._heap,
            journal=self._journal,
        )

    @property
    def _closed_to_operators(self) -> bool:
        """True where every caller of the HTTP port would be an operator: no key, and more than loopback."""
        return self._access.open and not is_loopback(self._settings.host)

    def _adapter_routes(self) -> AdapterRoutes:
        return AdapterRoutes(self._calls(Scope.ADMIN), self.adapter_service, closed=self._closed_to_operators)

    def _status_routes(self) -> StatusRoutes:
        return StatusRoutes(
            self._calls(Scope.ADMIN),
            self._operations.server_info,
            self._operations.load,
            closed=self._closed_to_operators,
        )

    @cached_property
    def _operations(self) -> Operations:
        identity = Identity(
            self._settings.worker_id, self._model.card, self._digest, self._settings.digest, started_now()
        )
        return Operations(
            self.worker_pool,
            self.gate.queue,
            self.live,
            self.metrics,
            identity,
            lambda: (self.ready, self._shutting_down, self.mirror.connected),
            self.adapter_service,
            self.roles,
        )

    def _bind_gauges(self) -> None:
        queue = self.gate.queue
        self.metrics.running.set_function(lambda: queue.running)
        self.metrics.waiting.set_function(lambda: queue.waiting)
        self.metrics.kv_quota.set_function(lambda: queue.kv.usable or 0)
        self.metrics.unread_output.set_function(lambda: self.unread_output.bytes)
        self.metrics.directory_connected.set_function(lambda: float(self.mirror.connected))
        if self._settings.metrics_compat == "vllm":
            name, workers = self._model.card.name, self.worker_pool.registry
            self.registry.register(VllmMetrics(self.metrics, name, lambda: workers.serving(Role.DECODE)))
            self.registry.register(VllmLoraMetrics(self.live.drivers, workers.linked))
        self.registry.register(AdapterMetrics(self.adapters, self.live.drivers))
        self.registry.register(LoadMetrics(self.worker_pool.registry.linked))
        self.registry.register(RoleMetrics(self.auto_roles.wanted_count, self.roles.done.__getitem__))
        for role in Role:
            self.metrics.workers.labels(role.value).set_function(
                lambda role=role: len(self.worker_pool.registry.serving(role))  # type: ignore[misc]
            )


def image_intake(model: ServedModel, settings: GatewaySettings) -> ImageIntake:
    """Return what takes the images of requests for ``model``; of a model of text it refuses them."""
    limits = ImageLimits(settings.max_images, settings.max_image_mib << 20, settings.image_memory_mib << 20)
    if model.images is None:
        return ImageIntake(None, limits)
    if find_spec("PIL") is None:
        why = "images need the extra `vision`: pip install 'diptych[vision]'"
        _log.warning("requests with images are refused: %s", why)
        return ImageIntake(None, limits, why)
    return ImageIntake(ImageDecoder(model.images.spec, settings.max_image_pixels), limits)


def _tokens(settings: GatewaySettings) -> tuple[TokenVerifier | None, FileKeys | UrlKeys | None]:
    """Return the verifier of tokens and its keys; None where none is taken. Raises StartupError."""
    rules = settings.token_rules
    if rules is None:
        return None, None
    from gateway.access.jwks import BadJwks  # PyJWT, which takes its time to be imported
    from gateway.access.tokens import open_tokens

    try:
        return open_tokens(rules, settings.jwt_jwks)
    except BadJwks as error:
        raise StartupError(f"--jwt-jwks: {error}") from None


def _credentials(tls: TlsFiles | None) -> grpc.ServerCredentials | None:
    return None if tls is None else tls.server_credentials()


def load_model(settings: GatewaySettings) -> tuple[ServedModel, str]:
    """Load the model's text side and compute its digest, in some tenths of a second. Raises StartupError."""
    try:
        path, names = checked_model(settings.model), listed(settings.served_model_name)
        template = None if settings.chat_template is None else read_template(settings.chat_template)
        model = ServedModel.load(
            path,
            settings.model_name,
            settings.max_model_len,
            names,
            chat_template=template,
            reasoning=settings.reasoning_parser,
        )
        return model, model_digest(path)
    except (FileNotFoundError, PermissionError) as error:
        raise StartupError(str(error)) from error
