"""The decode worker put together: pool, engine loop, handoff server, gateway links."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from decode_worker.adapter_gate import AdapterGate
from decode_worker.config import DecodeSettings
from decode_worker.drafters import make_speculation
from decode_worker.engine_loop import EngineLoop
from decode_worker.gateway_stream import GatewayStream
from decode_worker.kv_events.journal import Journal
from decode_worker.kv_events.publisher import make_publisher
from decode_worker.pool_memory import make_pool
from decode_worker.request import DecodeRequest, State, attempt_span
from decode_worker.request_manager import Listeners
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.runtime.kv_tier_specs import parse_tiers
from diptych.runtime.metrics import new_registry
from diptych.runtime.process import incarnation
from diptych.runtime.rpc_streams.method import DECODE
from diptych.runtime.rpc_streams.stream import LinkService
from diptych.runtime.telemetry import Telemetry
from diptych.runtime.worker_metrics import DecodeMetrics
from diptych.worker.v1 import decode_pb2, work_pb2
from diptych.worker_process.adapter_calls import AdapterCalls
from diptych.worker_process.adapter_store import AdapterStore
from diptych.worker_process.device_copies import copies_of, page_lock
from diptych.worker_process.engine_loader import load_engine, transports_of
from diptych.worker_process.gateway_link import DrainOrder, GatewayLinks, read_drain
from diptych.worker_process.grammar_masks import Grammars
from diptych.worker_process.group.rank_status import rank_statuses
from diptych.worker_process.kv_tiers import KvTiers
from diptych.worker_process.loaded_engine import LoadedEngine
from diptych.worker_process.logprob_codec import HANDOFF_FAILURES
from diptych.worker_process.program import serve_worker
from diptych.worker_process.server import WorkerServer
from diptych.worker_process.tier_stack import count_loaded, make_stack, watch_stack
from diptych.worker_process.worker_spec import WorkerSpec, engine_heartbeat
from kvtransfer.drivers.codec import key_of
from kvtransfer.drivers.server import HandoffServer
from kvtransfer.transports import registry

PREFILL_PHASES = {"queue": "prefill_queue", "kv_alloc_wait": "grant_wait", "prefill": "prefill"}
"""Phases of prompts that this worker computes itself, by name, and their fields in `PhaseTimes`."""


async def serve(settings: DecodeSettings, stop: asyncio.Event) -> int:
    """Load the model, serve until `stop`, drain; return the process's exit status."""
    return await serve_worker(settings, stop, DecodeWorker, load_engine)


class DecodeWorker:
    """A decode worker: makes its parts and wires them up; decides nothing itself."""

    def __init__(self, settings: DecodeSettings, engine: LoadedEngine, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._max_batch = settings.max_batch
        self._drafted = self._accepted = 0  # tokens, of attempts that have ended
        self._registry = new_registry()
        self._metrics = DecodeMetrics(self._registry)
        memory = make_pool(settings, engine)
        transports = transports_of(settings, memory.memory.data.device)
        self._metrics.create_transport_series(transports)
        self._memory_domain = registry.memory_domain(
            transports, memory.memory.data.device, settings.worker_id, engine.group
        )
        self._pool = BlockPool(memory.memory.num_blocks)
        self._metrics.set_gpu_memory(engine.memory.uses)
        engine.count_work(self._metrics.count_work)
        self._loop = EngineLoop(
            engine.runner,
            memory.memory,
            self._pool,
            max_batch=settings.max_batch,
            max_context=engine.model.shape.max_context,
            listeners=Listeners(ended=self._ended, cache_changed=self._cache_changed),
            speculation=make_speculation(settings, engine, memory.memory),
            draft_chunks=engine.draft_chunks,
        )
        bounds = settings.local_bounds(engine.model.device.type)
        self._handoff = HandoffServer(
            worker_id=settings.worker_id,
            incarnation=incarnation(),
            fingerprint=engine.fingerprint,
            memory=memory,
            pool=self._pool,
            transports=transports,
            running=lambda: self._loop.num_running,
            on_ready=self._loop.requests.on_ready,
            on_failed=self._loop.requests.on_failed,
            host=settings.host,
            heartbeat=lambda: engine_heartbeat(self._loop),
            gate=AdapterGate(self._loop.requests.adapter_of),
            tls=settings.link_tls,
            local_chunk=bounds.idle_chunk,
        )
        self._adapters = AdapterStore(
            engine.runner, slots=settings.max_loras, max_rank=settings.max_lora_rank
        )
        self._adapters.on_slot_free = self._handoff.blocks_freed
        self._loop.requests.adapters = self._adapters
        self._loop.requests.adapter_calls = AdapterCalls(self._adapters)
        self._loop.connect(self._handoff, bounds)
        self._loop.requests.grammars = Grammars(settings.model_path)
        self._group = engine.group
        self._events = make_publisher(settings)
        if self._events is not None:
            journal = Journal(self._events.publish, memory.memory.layout.block_size)
            self._loop.requests.prefixes.journal = journal
        self._tiers = self._make_tiers(settings, engine, memory.memory)
        hello = work_pb2.WorkerHello(worker_id=settings.worker_id, incarnation=incarnation())
        self._gateways = gateway_links(self._loop, hello, lambda order: self._server.drain(order))
        self._server = WorkerServer(settings, engine, self._spec())
        self._metrics.kv_cache_utilization.set_function(self._utilization)
        self._metrics.quarantined_blocks.set_function(self._pool.quarantined)
        self._metrics.quarantine_age.set_function(lambda: self._handoff.stats().quarantine_age_s)

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop`; return the exit status."""
        await self._handoff.start()
        if self._tiers is not None:
            self._tiers.start()
        try:
            return await self._server.run(stop)
        finally:
            await self._handoff.close()
            if self._tiers is not None:
                await asyncio.to_thread(self._tiers.close)
            if self._events is not None:
                await asyncio.to_thread(self._events.close)

    def _make_tiers(self, settings: DecodeSettings, engine: LoadedEngine, memory: KVMemory) -> KvTiers | None:
        stack = make_stack(
            parse_tiers(settings.kv_tier),
            engine.fingerprint,
            memory.layout.bytes_per_block,
            lock=page_lock(memory.device) if engine.group is None else None,
        )
        if stack is None:
            return None
        requests = self._loop.requests
        tiers = KvTiers(
            memory,
            self._pool,
            stack,
            changed=requests.blocks_changed,
            moved=self._tiers_changed,
            copies=copies_of(memory, stack.slots),
        )
        requests.tiers = tiers
        watch_stack(stack, self._metrics)
        return tiers

    def _spec(self) -> WorkerSpec:
        return WorkerSpec(
            role="decode",
            loop=self._loop,
            services=(LinkService(DECODE, self._gateways.serve), self._handoff.service),
            gateways=self._gateways,
            load=self._load,
            metrics=self._metrics,
            registry=self._registry,
            total_blocks=self._pool.total,
            owned_keys=self._pool.cached_keys,
            tiered_keys=self._tiered_keys,
            memory_domain=self._memory_domain,
        )

    def _load(self) -> work_pb2.Load:
        local = self._loop.local
        return work_pb2.Load(
            running=self._loop.num_running,
            waiting=self._loop.num_waiting,
            free_blocks=self._pool.available(),
            total_blocks=self._pool.total,
            quarantined_blocks=self._pool.quarantined(),
            max_running=self._max_batch,
            waiting_tokens=local.waiting_tokens,
            max_local_prefill_tokens=local.bounds.short,
            max_fallback_prefill_tokens=local.bounds.fallback,
            local_prefill_chunk=local.bounds.chunk,
            local_prefills=local.done,
            drafted_tokens=self._drafted,
            accepted_draft_tokens=self._accepted,
            adapters=self._adapters.digests,
            max_loras=self._adapters.max_loras,
            ranks=rank_statuses(self._group),
            stages=0 if self._group is None else self._group.grid.stages,
            tier_token_s=None if self._tiers is None else self._tiers.loads.token_s,
        )

    def _utilization(self) -> float:
        return 1 - self._pool.available() / self._pool.total

    def _tiered_keys(self) -> list[bytes]:
        return [] if self._tiers is None else self._tiers.stack.keys()

    def _cache_changed(self, added: list[bytes], removed: list[bytes]) -> None:
        tiered: list[bytes] = []
        if self._tiers is not None:
            tiered = self._tiers.cache_changed(added, removed)
        if (journal := self._loop.requests.prefixes.journal) is not None:
            journal.changed(added, removed, tiered)
        self._server.prefix_changed(added, removed, tiered)

    def _tiers_changed(self, tiered: Sequence[bytes], gone: Sequence[bytes]) -> None:
        if (journal := self._loop.requests.prefixes.journal) is not None:
            journal.left_tiers(gone)
        self._server.prefix_changed((), gone, tiered)

    def _ended(self, request: DecodeRequest) -> None:
        """Count and trace an attempt that has ended."""
        # Not those of the last message: they are older, and a cancelled attempt has no terminal message.
        times, metrics = request.times_now(), self._metrics
        metrics.preemptions.inc(request.outcomes.count("preempted"))
        metrics.draft_tokens.inc(request.drafted)
        metrics.accepted_tokens.inc(request.accepted)
        self._drafted += request.drafted
        self._accepted += request.accepted
        if request.loaded is not None:
            count_loaded(request.loaded, metrics)
        if request.failed_for in HANDOFF_FAILURES:
            metrics.kv_transfer_failures.labels(request.transport or "none").inc()
        if request.failed_for == work_pb2.FAILURE_REASON_TOO_MANY_NEW:
            metrics.local_prefills_refused.inc()
        if State.READY in request.entered:
            transport = request.transport
            if times.local_prefill:
                self._count_local(request, times)
            else:
                metrics.kv_transfer_duration.labels(transport).observe(times.kv_receive.ToNanoseconds() / 1e9)
                metrics.kv_transfer_bytes.labels(transport).inc(times.kv_bytes_transferred)
            metrics.prefix_cache_queries.inc(len(request.attempt.token_ids))
            metrics.prefix_cache_hits.inc(times.cached_tokens)
            for phase in ("decode_queue", "decode"):
                if times.HasField(phase):
                    metrics.phases[phase].observe(getattr(times, phase).ToNanoseconds() / 1e9)
        if self._telemetry.enabled and (span := attempt_span(request)) is not None:
            links = [] if State.PREFILLING in request.entered else [request.attempt.prefill_span]
            self._telemetry.emit_phases(request.attempt.trace, [span], links=links)

    def _count_local(self, request: DecodeRequest, times: work_pb2.PhaseTimes) -> None:
        """Count a prompt that was computed here, and its phases, which are a prefill worker's else."""
        metrics = self._metrics
        metrics.local_prefills.inc()
        metrics.local_prefill_tokens.inc(len(request.attempt.token_ids) - times.cached_tokens)
        for phase, field in PREFILL_PHASES.items():
            metrics.phases[phase].observe(getattr(times, field).ToNanoseconds() / 1e9)


def gateway_links(
    loop: EngineLoop, hello: work_pb2.WorkerHello, drain: Callable[[DrainOrder], None]
) -> GatewayLinks[GatewayStream]:
    """Return the links that bring gateways' messages to `loop`; `drain` gets the order to drain."""

    def on_message(message: decode_pb2.DecodeServiceLinkRequest, gateway: GatewayStream) -> None:
        match message.WhichOneof("message"):
            case "attach":
                loop.requests.attach(message.attach, gateway)
            case "cancel":
                loop.requests.cancel(key_of(message.cancel.id), message.cancel.choices)
            case "drain":
                drain(read_drain(message.drain))
            case "flush":
                gateway.flushed(message.flush.id, loop.flush_prefix_cache())
            case "load_adapter":
                loop.requests.adapter_calls.load(message.load_adapter, gateway)
            case "unload_adapter":
                loop.requests.adapter_calls.unload(message.unload_adapter, gateway)

    response = decode_pb2.DecodeServiceLinkResponse(hello=hello)
    return GatewayLinks(response, GatewayStream, on_message, loop.requests.gateway_lost)
