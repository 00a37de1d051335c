"""Assembly of the gateway: its components, their start and the order of its shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from diptych.runtime.discovery.mirror import DirectoryMirror
from diptych.runtime.discovery.worker_file import WorkerFileReader
from diptych.runtime.gateway_metrics import GatewayMetrics
from diptych.runtime.heap_trim import HeapTrim
from diptych.runtime.metrics import new_registry
from diptych.runtime.otlp_export import MetricExport, start_metric_export
from diptych.runtime.process import incarnation
from diptych.runtime.rpc import Health
from diptych.runtime.settings import StartupError
from diptych.runtime.telemetry import Telemetry
from gateway.access.access import Access
from gateway.access.journal import Journal
from gateway.access.key_file import Scope
from gateway.access.shared_quota.leases import QuotaLeases
from gateway.access.shared_quota.store import PoolStore
from gateway.adapter_service import read_configured
from gateway.call import Calls
from gateway.config import GatewaySettings
from gateway.frontends.admin.servicer import Identity, Operations, started_now
from gateway.images.fetcher import ImageFetcher
from gateway.images.memory import HeldMemory
from gateway.images.url_rules import UrlRules
from gateway.listeners import Listeners, ServedParts
from gateway.metrics.gauges import bind_gauges
from gateway.model.aliases import BadAlias
from gateway.model.small_requests import parse_small_requests
from gateway.request.grammar_check import GrammarCheck
from gateway.request_telemetry import create_series
from gateway.served_models.core import ModelCore, SharedParts
from gateway.served_models.directory import ModelDirectory
from gateway.served_models.loading import LoadedModel
from gateway.served_models.router import ModelRouter
from gateway.served_models.service import ModelService
from gateway.served_models.shared import SharedModels
from gateway.session.live_requests import LiveRequests
from gateway.setting_types import listed
from gateway.slow_readers import ReaderLimits, UnreadOutput, create_reader_series
from gateway.tokenizer_pool import TokenizerPool

if TYPE_CHECKING:
    from gateway.access.jwks import FileKeys, UrlKeys
    from gateway.access.token_verifier import TokenVerifier

_log = logging.getLogger(__name__)


class Gateway:
    """Gateway of this process: `start`, serve, `drain`, `close`."""

    def __init__(
        self, settings: GatewaySettings, models: Sequence[LoadedModel], *, incarnation_id: int | None = None
    ) -> None:
        """Create all components, for one model or several.

        ``incarnation_id`` tells gateways of one process apart; default: its own. Raises StartupError.
        """
        self._settings = settings
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
        verifier, self._token_keys = _tokens(settings)
        self._quotas = QuotaLeases(PoolStore(settings.redis_url, settings.worker_id), self.registry)
        self._access = Access(settings.api_keys_file, verifier, self._quotas.usage)
        self._heap = HeapTrim()
        reader_limits = ReaderLimits(
            settings.write_timeout, settings.stream_buffer_mib << 20, settings.total_stream_buffer_mib << 20
        )
        self.unread_output = UnreadOutput(reader_limits, self.metrics, self._heap)
        self.tokenizer_pool = TokenizerPool()
        self._grammars = GrammarCheck()
        self.image_fetcher = _fetcher(settings, self.metrics)
        self._changed = asyncio.Event()
        shared = SharedParts(
            settings,
            incarnation_id or incarnation(),
            self.metrics,
            self.telemetry,
            self.live,
            self.mirror,
            self.unread_output,
            self.tokenizer_pool,
            self._grammars,
            HeldMemory(settings.image_memory_mib << 20),
            self.image_fetcher,
            self._access.tenants,
            WorkerFileReader(settings.workers_fd).workers,
        )
        self.models = ModelDirectory(
            lambda loaded, neighbours: ModelCore(loaded, shared, neighbours), self._changed.set
        )
        for loaded in models:
            self.models.add(self.models.make(loaded))
        self._set_aliases()
        self._model_service = ModelService(self.models, settings, self.metrics.forget_model)
        self._shared_models = SharedModels(self._model_service, settings.redis_url)
        self.calls = self._calls(Scope.INFERENCE)
        identity = Identity(settings.worker_id, settings.digest, started_now())
        operations = Operations(self._model_service, self.live, self.metrics, identity, self._state)
        admin_calls = self._calls(Scope.ADMIN)
        self.router = ModelRouter(self.models)
        parts = ServedParts(
            self.router, self.calls, admin_calls, self._access, operations, self.registry, self.metrics
        )
        self._listeners = Listeners(settings, parts, self)
        self._health: Health | None = None
        self._watch: asyncio.Task[None] | None = None
        self._shutting_down = False
        self._metric_export: MetricExport | None = None

    @property
    def grpc_port(self) -> int:
        return self._listeners.grpc_port

    @property
    def http_port(self) -> int:
        return self._listeners.http_port

    @property
    def admin_port(self) -> int:
        return self._listeners.admin_port

    @property
    def ready(self) -> bool:
        """True if a request that comes now has workers to run on."""
        return not self.why_not_ready()

    def why_not_ready(self) -> str:
        """Return the reason in a line; empty while the gateway is ready, for one of its models at least."""
        if self._shutting_down:
            return "shutting down"
        why, outage = self.models.why_not_ready(), self.mirror.outage
        return f"{why}; {outage}" if why and outage else why

    def gives_work(self, worker_id: str) -> bool:
        """Return whether a worker of this id is linked and gets new work."""
        found = (core.worker_pool.registry.get(worker_id) for core in self.models)
        return any(worker is not None and worker.link.up and worker.accepts_work for worker in found)

    def lacks(self, model: str) -> str:
        """Return why requests for a model, or an alias, have no workers to run on; empty while they have."""
        return "shutting down" if self._shutting_down else self.models.lacks(model)

    def _state(self) -> tuple[bool, bool, bool]:
        return self.ready, self._shutting_down, self.mirror.connected

    def _set_aliases(self) -> None:
        try:
            for alias in self._settings.aliases:
                self.models.set_alias(alias)
        except BadAlias as error:
            raise StartupError(f"--model-split: {error}") from None
        try:
            self.models.set_small_requests(parse_small_requests(self._settings.small_requests))
        except BadAlias as error:
            raise StartupError(f"--small-requests: {error}") from None

    async def start(self) -> None:
        """Bind all ports and serve. Raises CannotListen, UnsafeBindError or, for --lora, StartupError."""
        settings = self._settings
        configured = read_configured(settings.adapters, settings.max_lora_rank)
        for core in self.models:
            core.adapter_service.start(configured if core is self.models.first else ())
        await self.mirror.start()
        if settings.api_keys_file is not None:
            self._quotas.start()
        for core in self.models:
            core.start()
        await self._shared_models.start()
        await self._workers_or_timeout(settings.await_workers_s)
        bind_gauges(
            self.registry,
            self.metrics,
            self.models,
            self.live,
            unread_bytes=lambda: self.unread_output.bytes,
            connected=lambda: self.mirror.connected,
            as_vllm=settings.metrics_compat == "vllm",
        )
        self._metric_export = start_metric_export(self.registry, "diptych-gateway", settings.worker_id)
        self._health = await self._listeners.open()
        self._watch = asyncio.create_task(self._watch_readiness(self._health), name="readiness")
        if self._listeners.batches is not None:
            self._listeners.batches.start()

    async def drain(self) -> None:
        """Refuse new requests, let the running ones finish within the grace period, then fail the rest.

        Where a successor shares the ports nothing is refused: the listeners close, gRPC clients get a GOAWAY,
        and requests over an old connection are still served.
        """
        self._shutting_down = True
        self._changed.set()
        for core in self.models.living:
            await core.auto_roles.close()
        if self._listeners.batches is not None:
            await self._listeners.batches.stop()
        if self._health is not None:
            await self._health.set_ready(False)
        await asyncio.sleep(self._settings.lame_duck)
        if self._settings.reuse_port:
            await self._listeners.leave()
        else:
            for core in self.models.living:
                core.begin_drain()
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
        while (seconds := self._listeners.next_request_s()) > 0:
            await asyncio.sleep(seconds)
            await self.calls.idle()

    async def _workers_or_timeout(self, seconds: float) -> None:
        """Wait until every model has workers, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(core.worker_pool.registry.missing_role() is not None for core in self.models):
                    self._changed.clear()
                    await self._changed.wait()

    async def close(self) -> None:
        """Stop at once; call `drain` first for a graceful shutdown."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        if self._listeners.batches is not None:
            await self._listeners.batches.stop()
        await self._listeners.close_grpc()
        if self._metric_export is not None:
            await self._metric_export.close()
        await self._shared_models.close()
        await self._model_service.close()
        await self.models.close()
        await self._grammars.close()
        self.tokenizer_pool.close()
        await self._quotas.close()
        if self.image_fetcher is not None:
            self.image_fetcher.close()
        await self.mirror.close()
        await self._listeners.close()
        await asyncio.to_thread(self.telemetry.stop)
        await asyncio.to_thread(self._journal.close)
        if self._token_keys is not None:
            self._token_keys.close()

    async def _watch_readiness(self, health: Health) -> None:
        """Set the health status: SERVING while a model has a matching prefill and decode worker."""
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


def _fetcher(settings: GatewaySettings, metrics: GatewayMetrics) -> ImageFetcher | None:
    """Return what fetches remote images; None where no host is listed."""
    if not (hosts := listed(settings.allow_image_urls)):
        return None
    count = metrics.image_fetches
    return ImageFetcher(
        UrlRules(hosts), settings.image_url_timeout, lambda outcome: count.labels(outcome).inc()
    )


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
