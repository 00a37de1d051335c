"""The prefill worker put together: engine loop, handoff client, gateway links."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.tiers.stack import TierStack
from diptych.engine.vision.embedding_cache import EmbeddingCache
from diptych.runtime.kv_tier_specs import parse_tiers
from diptych.runtime.metrics import new_registry
from diptych.runtime.process import incarnation
from diptych.runtime.rpc_streams.method import PREFILL
from diptych.runtime.rpc_streams.stream import LinkService
from diptych.runtime.telemetry import Telemetry
from diptych.runtime.worker_metrics import PrefillMetrics
from diptych.worker.v1 import prefill_pb2, work_pb2
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
from kvtransfer.drivers.client import HandoffClient
from kvtransfer.drivers.codec import key_of
from kvtransfer.drivers.embedding_client import OUTCOMES as EMBEDDING_OUTCOMES
from kvtransfer.drivers.embedding_client import EmbeddingClient
from kvtransfer.drivers.puller import DECLINED, OUTCOMES
from kvtransfer.drivers.scratch import Scratch
from kvtransfer.protocol.messages import WriterId
from kvtransfer.transports import in_process, registry
from kvtransfer.transports.row_channels import STREAM, row_ways
from prefill_worker.config import PrefillSettings
from prefill_worker.engine_loop import EngineLoop
from prefill_worker.gateway_stream import GatewayStream
from prefill_worker.gpu_plan import log_plan, plan_steps
from prefill_worker.image_encoding import ImageEncoding
from prefill_worker.image_fetching import ImageFetching
from prefill_worker.image_store import ImageStore
from prefill_worker.request import PrefillRequest, attempt_span
from prefill_worker.scheduler import ENOUGH_ON_CPU
from prefill_worker.scratch_memory import Memory, plan_scratch


async def serve(settings: PrefillSettings, stop: asyncio.Event) -> int:
    """Load the model, serve until `stop`, drain; return the process's exit status."""
    return await serve_worker(settings, stop, PrefillWorker, load_engine)


class PrefillWorker:
    """A prefill worker: makes its parts and wires them up; decides nothing itself."""

    def __init__(self, settings: PrefillSettings, engine: LoadedEngine, telemetry: Telemetry) -> None:
        self._settings = settings
        self._engine = engine
        self._telemetry = telemetry
        self._registry = new_registry()
        self._metrics = PrefillMetrics(self._registry)
        transports = transports_of(settings, engine.model.device)
        device = engine.model.device
        self._memory_domain = registry.memory_domain(transports, device, settings.worker_id, engine.group)
        device_type = device.type
        chunk = settings.chunk_tokens(device_type)
        most = max(chunk, engine.unbroken_rows)
        self._scratch_plan = plan_scratch(
            settings.scratch_blocks,
            transports,
            engine.layout,
            engine.model.shape.max_context,
            Memory.of(
                device,
                engine.runner.recorded_prompts,
                plan_steps(engine, chunk, settings.max_batch_requests),
                None if engine.group is None else partial(engine.group.memories.room_for, engine.layout),
            ),
            most,
        )
        log_plan(engine, self._scratch_plan.blocks)
        if engine.group is not None:
            engine.group.measure_memory(engine.layout, self._scratch_plan.blocks)
        self._metrics.set_gpu_memory(engine.memory.uses)
        engine.count_work(self._metrics.count_work)
        transports = self._scratch_plan.transports
        self._pulls = engine.layout.windows is None and not (
            registry.PULLS_FRAMES | registry.PULLS_MAPPED
        ).isdisjoint(transports)
        self._metrics.create_transport_series(transports)
        self._embeddings = EmbeddingCache(settings.image_cache_mib << 20)
        self._loop = EngineLoop(
            engine.runner,
            block_size=settings.block_size,
            chunk=chunk,
            enough=ENOUGH_ON_CPU if device_type == "cpu" else chunk,
            max_prompts=settings.max_batch_requests,
            max_context=engine.model.shape.max_context,
            on_ended=self._ended,
            images=self._images(),
            draft_chunks=engine.draft_chunks,
            writing=in_process.writing if settings.hosted else None,
        )
        self._tiers: KvTiers | None = None
        self._tier_stack = self._make_tier_stack()
        self._handoff = self._make_handoff(most)
        self._loop.requests.handoff = self._handoff
        self._encoders = self._fetch_rows()
        self._metrics.pull_cost.set_function(lambda: self._handoff.pull_rates.cost)
        for outcome in OUTCOMES:
            self._metrics.pulls.labels(outcome)
        self._loop.requests.grammars = Grammars(settings.model_path)
        self._adapters = AdapterStore(
            engine.runner, slots=settings.max_loras, max_rank=settings.max_lora_rank
        )
        self._adapters.on_slot_free = self._loop.requests.place_adapters
        self._loop.requests.adapters = self._adapters
        self._loop.requests.adapter_calls = AdapterCalls(self._adapters)
        hello = work_pb2.WorkerHello(worker_id=settings.worker_id, incarnation=incarnation())
        self._gateways = gateway_links(self._loop, hello, lambda order: self._server.drain(order))
        self._server = WorkerServer(settings, engine, self._spec())

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop`; return the exit status."""
        try:
            return await self._server.run(stop)
        finally:
            await self._handoff.close()
            if self._tiers is not None:
                await asyncio.to_thread(self._tiers.close)
            if self._encoders is not None:
                await self._encoders.close()

    def _make_tier_stack(self) -> TierStack | None:
        """Make the tiers below scratch; None without scratch, or without tiers."""
        if not self._scratch_plan.blocks:
            return None
        return make_stack(
            parse_tiers(self._settings.kv_tier),
            self._engine.fingerprint,
            self._engine.layout.bytes_per_block,
            reads_shared=True,
            lock=page_lock(self._engine.model.device) if self._engine.group is None else None,
        )

    def _make_handoff(self, chunk: int) -> HandoffClient:
        """Make the links to decode workers; `chunk`: most tokens of a prompt that are computed at once."""
        settings, engine, loop = self._settings, self._engine, self._loop
        return HandoffClient(
            worker_id=settings.worker_id,
            incarnation=incarnation(),
            fingerprint=engine.fingerprint,
            layout=engine.layout,
            transports=self._scratch_plan.transports,
            device=engine.model.device,
            scratch=self._scratch if self._scratch_plan.blocks else None,
            tiers=self._make_tiers,
            on_abort=loop.requests.on_abort,
            on_peer_lost=loop.requests.on_peer_lost,
            heartbeat=lambda: engine_heartbeat(loop),
            cache_changed=self._cache_changed,
            on_pull_end=self._count_pull,
            pull_mode=settings.pull_prefixes,
            ranks=engine.group,
            tls=settings.link_tls,
            chunk_tokens=chunk,
        )

    def _spec(self) -> WorkerSpec:
        return WorkerSpec(
            role="prefill",
            loop=self._loop,
            services=(LinkService(PREFILL, self._gateways.serve),),
            gateways=self._gateways,
            load=self._load,
            metrics=self._metrics,
            registry=self._registry,
            owned_keys=self._handoff.cached_keys,
            tiered_keys=lambda: [] if self._tiers is None else self._tiers.stack.keys(),
            memory_domain=self._memory_domain,
        )

    def _images(self) -> ImageEncoding | None:
        """Make the part that encodes images; None for a model of text."""
        settings, encoder = self._settings, self._engine.encoder
        if encoder is None:
            return None
        outcomes = {name: self._metrics.images.labels(name) for name in ("encoded", "cached")}
        return ImageEncoding(
            encoder,
            ImageStore(settings.image_buffer_mib << 20),
            self._embeddings,
            threads=lambda: self._engine.runner.threads,
            on_image=lambda outcome: outcomes[outcome].inc(),
        )

    def _fetch_rows(self) -> EmbeddingClient | None:
        """Let prompts fetch rows of images from encode workers; None for a model of text."""
        fingerprint, images = self._engine.embedding_fingerprint, self._engine.images
        if fingerprint is None or images is None:
            return None
        requests, metrics = self._loop.requests, self._metrics
        requests.fetching = ImageFetching(
            self._embeddings,
            whole=images.whole,
            on_image=lambda outcome: metrics.images.labels(outcome).inc(),
            on_rows=requests.rows_arrived,
            on_failed=requests.rows_failed,
        )
        for outcome in EMBEDDING_OUTCOMES:
            metrics.embedding_fetches.labels(outcome)
        ways = row_ways(self._scratch_plan.transports)
        for way in (*ways, STREAM):
            metrics.embedding_bytes.labels(way)
        requests.fetching.source = client = EmbeddingClient(
            WriterId(self._settings.worker_id, incarnation()),
            fingerprint,
            on_rows=requests.fetching.arrived,
            on_failed=requests.fetching.failed,
            on_outcome=lambda outcome: metrics.embedding_fetches.labels(outcome).inc(),
            on_bytes=lambda way, count: metrics.embedding_bytes.labels(way).inc(count),
            heartbeat=lambda: engine_heartbeat(self._loop),
            device=self._engine.model.device,
            tls=self._settings.link_tls,
            transports=ways,
        )
        return client

    def _scratch(self) -> tuple[KVMemory, BlockPool]:
        """Make the worker's own pool, when the first copying transport is registered."""
        blocks = self._scratch_plan.blocks
        return self._engine.model.kv_memory(self._engine.layout, blocks), BlockPool(blocks)

    def _make_tiers(self, scratch: Scratch, pool: BlockPool) -> KvTiers | None:
        """Make what moves blocks between scratch and the tiers; from now on the directory names theirs."""
        stack = self._tier_stack
        if stack is None:
            return None
        self._tiers = KvTiers(
            scratch.memory,
            pool,
            stack,
            changed=scratch.serve_waiting,
            moved=lambda tiered, gone: self._server.prefix_changed((), gone, tiered),
            copies=copies_of(scratch.memory, stack.slots),
        )
        self._tiers.start()
        watch_stack(stack, self._metrics)
        self._server.prefix_changed((), (), stack.keys())
        return self._tiers

    def _cache_changed(self, added: list[bytes], removed: list[bytes]) -> None:
        tiered = [] if self._tiers is None else self._tiers.cache_changed(added, removed)
        self._server.prefix_changed(added, removed, tiered)

    def _load(self) -> work_pb2.Load:
        return work_pb2.Load(
            running=self._loop.num_running,
            waiting=self._loop.num_waiting,
            waiting_tokens=self._loop.waiting_tokens,
            adapters=self._adapters.digests,
            max_loras=self._adapters.max_loras,
            ranks=rank_statuses(self._engine.group),
            stages=0 if self._engine.group is None else self._engine.group.grid.stages,
            pull_cost=self._handoff.pull_rates.expected_cost if self._pulls else None,
            tier_token_s=None if self._tiers is None else self._tiers.loads.token_s,
        )

    def _count_pull(self, outcome: str, blocks: int, seconds: float) -> None:
        metrics = self._metrics
        metrics.pulls.labels(outcome).inc()
        metrics.pulled_tokens.inc(blocks * self._engine.layout.block_size)
        if outcome != DECLINED:
            metrics.pull_duration.observe(seconds)

    def _ended(self, request: PrefillRequest, outcome: str) -> None:
        """Count and trace an attempt that has ended."""
        times, metrics = request.times(), self._metrics
        for phase, field in (
            ("queue", "prefill_queue"),
            ("kv_alloc_wait", "grant_wait"),
            ("kv_pull", "kv_pull"),
            ("encode", "encode"),
            ("prefill", "prefill"),
        ):
            if times.HasField(field):
                metrics.phases[phase].observe(getattr(times, field).ToNanoseconds() / 1e9)
        if request.granted is not None:
            count_loaded(request.granted.loaded, metrics)
        if outcome == "committed" and request.granted is not None:
            transport = request.granted.transport
            metrics.kv_transfer_duration.labels(transport).observe(times.kv_send.ToNanoseconds() / 1e9)
        elif request.failure is not None and request.failure.reason in HANDOFF_FAILURES:
            transport = request.granted.transport if request.granted is not None else "none"
            metrics.kv_transfer_failures.labels(transport).inc()
        if self._telemetry.enabled:
            self._telemetry.emit_phases(request.attempt.trace, [attempt_span(request, outcome)])


def gateway_links(
    loop: EngineLoop, hello: work_pb2.WorkerHello, drain: Callable[[DrainOrder], None]
) -> GatewayLinks[GatewayStream]:
    """Return the links that bring gateways' messages to `loop`; `drain` gets the order to drain."""

    def on_message(message: prefill_pb2.PrefillServiceLinkRequest, gateway: GatewayStream) -> None:
        match message.WhichOneof("message"):
            case "image":
                loop.requests.receive_image(message.image, gateway)
            case "dispatch":
                loop.requests.dispatch(message.dispatch, gateway)
            case "cancel":
                loop.requests.cancel(key_of(message.cancel.id), message.cancel.choices)
            case "flush":
                gateway.flushed(message.flush.id, loop.flush_prefix_cache())
            case "load_adapter":
                loop.requests.adapter_calls.load(message.load_adapter, gateway)
            case "unload_adapter":
                loop.requests.adapter_calls.unload(message.unload_adapter, gateway)
            case "drain":
                drain(read_drain(message.drain))

    response = prefill_pb2.PrefillServiceLinkResponse(hello=hello)
    return GatewayLinks(response, GatewayStream, on_message, loop.requests.gateway_lost)
