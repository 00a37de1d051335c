"""Putting a prefill worker together: engine loop, handoff client, edges."""

from __future__ import annotations

import asyncio

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.runtime.metrics import PrefillMetrics, new_registry
from diptych.runtime.process import incarnation
from diptych.runtime.rpc_streams.method import PREFILL
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
from kvtransfer.drivers.client import HandoffClient
from kvtransfer.transports import registry
from prefill_worker.config import PrefillSettings
from prefill_worker.engine_loop import EngineLoop
from prefill_worker.request import PrefillRequest
from prefill_worker.scheduler import ENOUGH_ON_CPU
from prefill_worker.service import gateway_links
from prefill_worker.trace_spans import attempt_span


async def serve(settings: PrefillSettings, stop: asyncio.Event) -> int:
    """Load the model, serve until `stop`, drain; the process's exit status."""
    return await serve_worker(settings, stop, PrefillWorker)


class PrefillWorker:
    """Owns everything of one prefill worker and wires it up; decides nothing itself."""

    def __init__(self, settings: PrefillSettings, engine: LoadedEngine, telemetry: Telemetry) -> None:
        self._settings = settings
        self._engine = engine
        self._telemetry = telemetry
        self._registry = new_registry()
        self._metrics = PrefillMetrics(self._registry)
        device_type = engine.model.device.type
        chunk = settings.chunk_tokens(device_type)
        self._loop = EngineLoop(
            engine.runner,
            block_size=settings.block_size,
            chunk=chunk,
            enough=ENOUGH_ON_CPU if device_type == "cpu" else chunk,
            max_prompts=settings.max_batch_requests,
            max_context=engine.model.shape.max_context,
            on_ended=self._ended,
        )
        self._handoff = HandoffClient(
            worker_id=settings.worker_id,
            incarnation=incarnation(),
            fingerprint=engine.fingerprint,
            layout=engine.layout,
            transports=registry.transports_for(settings.transport, engine.model.device),
            device=engine.model.device,
            scratch=self._scratch,
            on_abort=self._loop.attempts.on_abort,
            on_peer_lost=self._loop.attempts.on_peer_lost,
            heartbeat=lambda: beat_of(self._loop),
        )
        self._loop.attempts.handoff = self._handoff
        self._loop.attempts.grammars = Grammars(settings.model_path)
        hello = work_pb2.WorkerHello(worker_id=settings.worker_id, incarnation=incarnation())
        self._gateways = gateway_links(self._loop, hello, lambda grace_s: self._shell.drain(grace_s))
        self._shell = WorkerServer(settings, engine, self._kind())

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop`; the exit status."""
        try:
            return await self._shell.run(stop)
        finally:
            await self._handoff.close()

    def _kind(self) -> WorkerSpec:
        return WorkerSpec(
            role="prefill",
            loop=self._loop,
            services=(LinkService(PREFILL, self._gateways.serve),),
            gateways=self._gateways,
            load=self._load,
            metrics=self._metrics,
            registry=self._registry,
        )

    def _scratch(self) -> tuple[KVMemory, BlockPool]:
        """The worker's own pool, made when the first copying transport is registered."""
        blocks = self._settings.num_scratch_blocks(self._engine.model.shape.max_context)
        return self._engine.model.kv_memory(self._engine.layout, blocks), BlockPool(blocks)

    def _load(self) -> work_pb2.Load:
        return work_pb2.Load(
            running=self._loop.num_running,
            waiting=self._loop.num_waiting,
            waiting_tokens=self._loop.waiting_tokens,
        )

    def _ended(self, request: PrefillRequest, outcome: str) -> None:
        """Count and trace an attempt that is over."""
        times, metrics = request.times(), self._metrics
        for phase, field in (
            ("queue", "prefill_queue"),
            ("grant_wait", "grant_wait"),
            ("prefill", "prefill"),
        ):
            if times.HasField(field):
                metrics.phase_duration.labels(phase).observe(getattr(times, field).ToNanoseconds() / 1e9)
        if outcome == "committed" and request.granted is not None:
            transport = request.granted.transport
            metrics.kv_transfer_duration.labels(transport).observe(times.kv_send.ToNanoseconds() / 1e9)
        elif request.failure is not None and request.failure.reason in OF_THE_HAND_OVER:
            transport = request.granted.transport if request.granted is not None else "none"
            metrics.kv_transfer_failures.labels(transport).inc()
        if self._telemetry.enabled:
            self._telemetry.emit_phases(request.attempt.trace, [attempt_span(request, outcome)])
