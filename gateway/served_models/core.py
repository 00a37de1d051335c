"""Core of one model of a gateway: its texts, its workers, its queue, and the life of its requests.

A gateway has a core for each model. Workers are told apart by the digest of their model's files, so that a
model that is replaced under its name has another core, and both serve while requests of the old one run.
What all models share (callers, live requests, the directory's copy, metrics) is in `SharedParts`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from diptych.runtime.discovery.mirror import DirectoryMirror
from diptych.runtime.discovery.quota_table import QuotaTableStore
from diptych.runtime.discovery.records import WorkerRecord
from diptych.runtime.discovery.role_lease import RoleLease
from diptych.runtime.errors import UnknownModel
from diptych.runtime.gateway_metrics import GatewayMetrics
from diptych.runtime.telemetry import Telemetry
from gateway.access.access import Caller
from gateway.adapter_service import AdapterService
from gateway.adapters.adapter import Adapter
from gateway.adapters.registry import AdapterRegistry
from gateway.admission.gate import AdmissionGate
from gateway.admission.memory_quota import MemoryQuota
from gateway.admission.queue import AdmissionQueue
from gateway.admission.shared_fair_shares import FairShareTable, SharedFairShares
from gateway.admission.wait import MaxQueueDelay
from gateway.config import GatewaySettings
from gateway.generate import Generator
from gateway.images.fetcher import ImageFetcher
from gateway.images.memory import HeldMemory
from gateway.request.grammar_check import GrammarCheck
from gateway.request.resume_token import ResumeTokens
from gateway.request_parser import RequestParser
from gateway.served_models.loading import LoadedModel, image_intake
from gateway.session.live_requests import LiveRequests
from gateway.session.retry_policy import RetryBudget, RetryLimits
from gateway.slow_readers import UnreadOutput
from gateway.tokenizer_pool import TokenizerPool
from gateway.tokenizer_service import TokenizerService
from gateway.worker_pool.auto_roles import AutoRoles
from gateway.worker_pool.local_prefill import LocalMode
from gateway.worker_pool.role_changes import RoleChanges
from gateway.worker_pool.role_demand import SloTargets
from gateway.worker_pool.role_rules import RoleBounds
from gateway.worker_pool.worker_pool import GatewayIdentity, WorkerPool


@dataclass(frozen=True)
class SharedParts:
    """Parts of a gateway that all its models use.

    Args:
        image_memory: bounds what images of running requests take.
        image_fetcher: None where no remote images are fetched.
        tenants: returns how many there are.
        local_workers: returns the workers that the gateway's own supervisor knows to serve.
    """

    settings: GatewaySettings
    incarnation: int
    metrics: GatewayMetrics
    telemetry: Telemetry
    live: LiveRequests
    mirror: DirectoryMirror
    unread_output: UnreadOutput
    tokenizer_pool: TokenizerPool
    grammars: GrammarCheck
    image_memory: HeldMemory
    image_fetcher: ImageFetcher | None
    tenants: Callable[[], int]
    local_workers: Callable[[], list[WorkerRecord]]


@dataclass(frozen=True)
class Neighbours:
    """Questions of a core about the gateway's other models.

    Args:
        several: returns whether there are others.
        is_served: returns whether one of all models has this digest.
        is_taken: returns whether a name is another model's, or that of another's adapter.
        on_change: called when workers of the model came, went or changed.
        strangers: workers of models that are not served, which the log has named.
    """

    several: Callable[[], bool] = lambda: False
    is_served: Callable[[str], bool] = lambda digest: False
    is_taken: Callable[[str], bool] = lambda name: False
    on_change: Callable[[], None] = lambda: None
    strangers: set[tuple[str, int]] = field(default_factory=set)


class ModelCore:
    """Core of one model: `start`, serve, `begin_drain`, `close`."""

    def __init__(self, loaded: LoadedModel, shared: SharedParts, neighbours: Neighbours) -> None:
        self.model, self.digest, self.path = loaded.model, loaded.digest, loaded.path
        self._settings = settings = shared.settings
        self._neighbours = neighbours
        self._calls = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self.adapters = AdapterRegistry(self.model.card)
        self.worker_pool = self._pool(shared)
        self.adapter_service = AdapterService(
            self.adapters,
            self.worker_pool.adapter_loads,
            settings.max_lora_rank,
            settings.redis_url,
            self.digest,
            shared.metrics.forget_model,
            neighbours.is_taken,
        )
        self.gate = _gate(settings, shared.tenants)
        self.roles, self.auto_roles = self._roles()
        self._quota = MemoryQuota(
            self.gate, QuotaTableStore(settings.redis_url, self.digest, settings.worker_id)
        )
        self._fair_shares = SharedFairShares(
            self.gate,
            FairShareTable(settings.redis_url, self.digest, settings.worker_id),
            shared.tenants,
            shared.metrics,
        )
        self.tokens = ResumeTokens(
            settings.secret_bytes, self.digest, wall_clock=time.time, several=neighbours.several
        )
        images = image_intake(self.model, settings, shared.image_memory, shared.image_fetcher)
        self.request_parser = RequestParser(
            self.model,
            shared.tokenizer_pool,
            self.tokens,
            time.monotonic,
            images,
            shared.grammars,
            lenient_json_schema=settings.lenient_json_schema,
        )
        self.generator = self._generator(shared)
        self.tokenizer_service = TokenizerService(
            self.model,
            self.digest,
            self.adapters,
            shared.live,
            shared.tokenizer_pool,
            token_limit=self.worker_pool.registry.token_limit,
            block_size=self.worker_pool.registry.block_size,
            images=images,
        )

    @property
    def name(self) -> str:
        return self.model.card.name

    @property
    def running(self) -> int:
        """Calls that use this model now."""
        return self._calls

    def why_not_ready(self) -> str:
        """Return why a request that comes now has no workers to run on; empty while it has."""
        return self.worker_pool.registry.why_not_ready()

    def answers_to(self, name: str) -> bool:
        """Return whether a name is the model's, or one of its adapters'."""
        return self.model.card.answers_to(name) or self.adapters.get(name) is not None

    def require_name(self, name: str, caller: Caller) -> Adapter | None:
        """Return the adapter that a call names; None for the model itself. Raises UnknownModel."""
        adapter = self.adapters.choose(name, "", caller)
        if adapter is None and not self.model.card.answers_to(name):
            raise UnknownModel(name, self.name)
        return adapter

    def start(self) -> None:
        """Follow the directory, and link to the model's workers."""
        self.worker_pool.start()
        self._quota.start()
        if self._settings.fair_shares == "shared":
            self._fair_shares.start()
        if self._settings.auto_roles:
            self.auto_roles.start()

    def begin_drain(self) -> None:
        """Refuse new requests."""
        self.generator.draining = True
        self.worker_pool.arrivals.release()

    async def close(self) -> None:
        """End all links; what still runs is lost."""
        await self.adapter_service.close()
        await self._quota.close()
        await self._fair_shares.close()
        await self.auto_roles.close()
        await self.roles.close()
        await self.worker_pool.close()
        await self.request_parser.close()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep the core while a call uses it."""
        self._calls += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._unused.set()

    async def unused(self) -> None:
        """Wait until no call uses it."""
        await self._unused.wait()

    def _pool(self, shared: SharedParts) -> WorkerPool:
        settings = self._settings
        identity = GatewayIdentity(settings.worker_id, shared.incarnation, self.digest, settings.secret_bytes)
        return WorkerPool(
            shared.mirror,
            shared.live,
            identity,
            clock=time.monotonic,
            on_change=self._workers_changed,
            arrival_wait_s=settings.worker_wait_timeout,
            local_workers=shared.local_workers,
            local_prefill=LocalMode(settings.local_prefill),
            needed_adapters=lambda: self.adapters.needed,
            tls=settings.link_tls,
            is_served=self._neighbours.is_served,
            strangers=self._neighbours.strangers,
        )

    def _roles(self) -> tuple[RoleChanges, AutoRoles]:
        settings, registry = self._settings, self.worker_pool.registry
        changes = RoleChanges(
            registry,
            RoleLease(settings.redis_url, self.digest),
            time.monotonic,
            pause_s=settings.auto_roles_pause_s,
        )
        targets = SloTargets(settings.slo_ttft_ms / 1000, settings.slo_itl_ms / 1000)
        bounds = RoleBounds(settings.min_prefill_workers, settings.min_decode_workers)
        return changes, AutoRoles(registry, self.gate.queue, changes, targets, bounds, time.monotonic)

    def _generator(self, shared: SharedParts) -> Generator:
        settings = self._settings
        return Generator(
            self.model,
            self.digest,
            self.worker_pool,
            shared.live,
            self.gate,
            self.request_parser,
            shared.unread_output,
            tokens=self.tokens,
            retry_limits=RetryLimits(RetryBudget(settings.max_inflight), settings.worker_wait_timeout),
            telemetry=shared.telemetry,
            metrics=shared.metrics,
            clock=time.monotonic,
            adapters=self.adapters,
        )

    def _workers_changed(self) -> None:
        self.gate.resize(self.worker_pool.registry.capacity())
        self._neighbours.on_change()


def _gate(settings: GatewaySettings, tenants: Callable[[], int]) -> AdmissionGate:
    delay_s = settings.max_queue_delay_s
    max_delay = MaxQueueDelay(seconds=None if delay_s == "auto" else delay_s)
    queue = AdmissionQueue(
        settings.max_inflight, settings.max_queued_tokens, max_delay=max_delay, tenants=tenants
    )
    return AdmissionGate(queue, time.monotonic)
