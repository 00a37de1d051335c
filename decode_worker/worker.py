"""Putting a decode worker together: pool, engine loop, handoff, edges."""

from __future__ import annotations

import asyncio

from decode_worker.config import DecodeSettings
from decode_worker.engine_loop import EngineLoop
from decode_worker.pool_memory import make_pool
from decode_worker.prompt_lookup import PromptLookup
from decode_worker.request import DecodeRequest, State
from decode_worker.request_manager import Listeners
from decode_worker.service import gateway_links
from decode_worker.speculation import Speculation
from decode_worker.step_pacing import StepPacing
from decode_worker.trace_spans import attempt_span
from diptych.engine.kv.block_pool import BlockPool
from diptych.runtime.metrics import DecodeMetrics, new_registry
from diptych.runtime.process import incarnation
from diptych.runtime.rpc_streams.method import DECODE
from diptych.runtime.rpc_streams.stream import LinkService
from diptych.runtime.telemetry import Telemetry
from diptych.worker.v1 import work_pb2
from diptych.worker_process.engine_loader import LoadedEngine
from diptych.worker_process.failure_names import OF_THE_HAND_OVER
from diptych.worker_process.grammar_masks import Grammars
from diptych.worker_process.heartbeat import beat_of
from diptych.worker_process.program import serve_worker
from diptych.worker_process.server import WorkerServer
from diptych.worker_process.worker_spec import WorkerSpec
from kvtransfer.drivers.server import HandoffServer
from kvtransfer.transports import registry


async def serve(settings: DecodeSettings, stop: asyncio.Event) -> int:
    """Load the model, serve until `stop`, drain; the process's exit status."""
    return await serve_worker(settings, stop, DecodeWorker)


class DecodeWorker:
    """Owns everything of one decode worker and wires it up; decides nothing itself."""

    def __init__(self, settings: DecodeSettings, engine: LoadedEngine, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._max_batch = settings.max_batch
        self._registry = new_registry()
        self._metrics = DecodeMetrics(self._registry)
        memory = make_pool(settings, engine)
        self._pool = BlockPool(memory.memory.num_blocks)
        self._loop = EngineLoop(
            engine.runner,
            memory.memory,
            self._pool,
            max_batch=settings.max_batch,
            max_context=engine.model.shape.max_context,
            listeners=Listeners(ended=self._ended, cache_changed=self._cache_changed),
            pace=StepPacing(settings.itl_stretch, settings.itl_stretch_max),
            speculation=_speculation(settings, memory.memory.layout.block_size),
        )
        self._handoff = HandoffServer(
            worker_id=settings.worker_id,
            incarnation=incarnation(),
            fingerprint=engine.fingerprint,
            memory=memory,
            pool=self._pool,
            transports=registry.transports_for(settings.transport, memory.memory.data.device),
            running=lambda: self._loop.num_running,
            on_ready=self._loop.attempts.on_ready,
            on_failed=self._loop.attempts.on_failed,
            host=settings.host,
            heartbeat=lambda: beat_of(self._loop),
        )
        self._loop.attempts.grants = self._handoff
        self._loop.attempts.grammars = Grammars(settings.model_path)
        hello = work_pb2.WorkerHello(worker_id=settings.worker_id, incarnation=incarnation())
        self._gateways = gateway_links(self._loop, hello, lambda grace_s: self._shell.drain(grace_s))
        self._shell = WorkerServer(settings, engine, self._kind())
        self._metrics.kv_cache_utilization.set_function(self._utilization)
        self._metrics.quarantined_blocks.set_function(self._pool.quarantined)
        self._metrics.quarantine_age.set_function(lambda: self._handoff.stats().quarantine_age_s)

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop`; the exit status."""
        await self._handoff.start()
        try:
            return await self._shell.run(stop)
        finally:
            await self._handoff.close()

    def _kind(self) -> WorkerSpec:
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
        )

    def _load(self) -> work_pb2.Load:
        return work_pb2.Load(
            running=self._loop.num_running,
            waiting=self._loop.num_waiting,
            free_blocks=self._pool.available(),
            total_blocks=self._pool.total,
            quarantined_blocks=self._pool.quarantined(),
            max_running=self._max_batch,
        )

    def _utilization(self) -> float:
        return 1 - self._pool.available() / self._pool.total

    def _cache_changed(self, added: list[bytes], removed: list[bytes]) -> None:
        self._shell.prefix_changed(added, removed)

    def _ended(self, request: DecodeRequest) -> None:
        """Count and trace an attempt that is over."""
        # What a message told last is old by now; of an attempt that was cancelled no message told its end.
        times, metrics = request.times_now(), self._metrics
        metrics.preemptions.inc(request.outcomes.count("preempted"))
        metrics.draft_tokens.inc(request.drafted)
        metrics.accepted_tokens.inc(request.accepted)
        if request.failed_for in OF_THE_HAND_OVER:
            metrics.kv_transfer_failures.labels(request.transport or "none").inc()
        if State.READY in request.entered:
            transport = request.transport
            metrics.kv_transfer_duration.labels(transport).observe(times.kv_receive.ToNanoseconds() / 1e9)
            metrics.kv_transfer_bytes.labels(transport).inc(times.kv_bytes_transferred)
            metrics.prefix_cache_queries.inc(len(request.attempt.token_ids))
            metrics.prefix_cache_hits.inc(times.cached_tokens)
            for phase in ("decode_queue", "decode"):
                if times.HasField(phase):
                    seconds = getattr(times, phase).ToNanoseconds() / 1e9
                    metrics.phase_duration.labels(phase).observe(seconds)
        if self._telemetry.enabled and (span := attempt_span(request)) is not None:
            self._telemetry.emit_phases(request.attempt.trace, [span], links=[request.attempt.prefill_span])


def _speculation(settings: DecodeSettings, block_size: int) -> Speculation | None:
    most, tokens = settings.speculative_tokens, settings.speculative_step_tokens
    if most == 0:
        return None
    return Speculation(PromptLookup(most), most=most, tokens=tokens, block_size=block_size)
