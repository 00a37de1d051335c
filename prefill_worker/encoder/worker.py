"""The encode worker put together: engine loop, gateway links, links of prefill workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from diptych.engine.vision.embedding_cache import EmbeddingCache
from diptych.runtime.metrics import new_registry
from diptych.runtime.process import incarnation
from diptych.runtime.rpc_streams.method import ENCODE
from diptych.runtime.rpc_streams.stream import LinkService
from diptych.runtime.telemetry import Telemetry
from diptych.runtime.worker_metrics import EncodeMetrics
from diptych.worker.v1 import encode_pb2, work_pb2
from diptych.worker_process.gateway_link import DrainOrder, GatewayLinks, read_drain
from diptych.worker_process.program import serve_worker
from diptych.worker_process.server import WorkerServer
from diptych.worker_process.worker_spec import WorkerSpec, engine_heartbeat
from kvtransfer.drivers.codec import key_of
from kvtransfer.drivers.embedding_server import EmbeddingServer
from kvtransfer.protocol.messages import WriterId
from kvtransfer.transports.row_registry import make_row_listeners
from prefill_worker.encoder.config import EncodeSettings
from prefill_worker.encoder.engine import LoadedEncoder, load
from prefill_worker.encoder.engine_loop import EncodeLoop
from prefill_worker.encoder.gateway_stream import EncodeGatewayStream
from prefill_worker.encoder.request import EncodeRequest
from prefill_worker.image_store import ImageStore


async def serve(settings: EncodeSettings, stop: asyncio.Event) -> int:
    """Load the encoder, serve until `stop`, drain; return the process's exit status."""
    return await serve_worker(settings, stop, EncodeWorker, load)


class EncodeWorker:
    """An encode worker: makes its parts and wires them up; decides nothing itself."""

    def __init__(self, settings: EncodeSettings, engine: LoadedEncoder, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        registry = new_registry()
        self._metrics = metrics = EncodeMetrics(registry)
        outcomes = {name: metrics.images.labels(name) for name in ("encoded", "cached")}
        self._loop = loop = EncodeLoop(
            engine,
            ImageStore(settings.image_buffer_mib << 20),
            EmbeddingCache(settings.image_cache_mib << 20),
            on_ended=self._ended,
            on_image=lambda outcome: outcomes[outcome].inc(),
        )
        metrics.cached_bytes.set_function(lambda: loop.cached_bytes)
        self._embeddings = EmbeddingServer(
            WriterId(settings.worker_id, incarnation()),
            engine.fingerprint,
            on_ask=loop.ask,
            on_taken=loop.taken,
            on_lost=loop.reader_lost,
            heartbeat=lambda: engine_heartbeat(loop),
            listeners=make_row_listeners(settings.host, settings.link_tls),
        )
        hello = work_pb2.WorkerHello(worker_id=settings.worker_id, incarnation=incarnation())
        gateways = gateway_links(loop, hello, lambda order: self._server.drain(order))
        spec = WorkerSpec(
            role="encode",
            loop=loop,
            services=(LinkService(ENCODE, gateways.serve), self._embeddings.service),
            gateways=gateways,
            load=self._load,
            metrics=metrics,
            registry=registry,
        )
        self._server = WorkerServer(settings, engine, spec)

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop`; return the exit status."""
        await self._embeddings.start()
        try:
            return await self._server.run(stop)
        finally:
            await self._embeddings.close()

    def _load(self) -> work_pb2.Load:
        loop = self._loop
        return work_pb2.Load(
            running=loop.num_running, waiting=loop.num_waiting, waiting_tokens=loop.waiting_rows
        )

    def _ended(self, request: EncodeRequest, outcome: str) -> None:
        """Count and trace an attempt that has ended."""
        for phase, seconds in request.phases().items():
            self._metrics.phases[phase].observe(seconds)
        if self._telemetry.enabled:
            self._telemetry.emit_phases(request.trace, [request.span(outcome)])


def gateway_links(
    loop: EncodeLoop, hello: work_pb2.WorkerHello, drain: Callable[[DrainOrder], None]
) -> GatewayLinks[EncodeGatewayStream]:
    """Return the links that bring gateways' messages to `loop`; `drain` gets the order to drain."""

    def on_message(message: encode_pb2.EncodeServiceLinkRequest, gateway: EncodeGatewayStream) -> None:
        match message.WhichOneof("message"):
            case "image":
                loop.receive_image(message.image, gateway)
            case "encode":
                loop.encode(message.encode, gateway)
            case "cancel":
                loop.cancel(key_of(message.cancel.id))
            case "flush":
                gateway.flushed(message.flush.id, loop.flush())
            case "drain":
                drain(read_drain(message.drain))

    response = encode_pb2.EncodeServiceLinkResponse(hello=hello)
    return GatewayLinks(response, EncodeGatewayStream, on_message, loop.gateway_lost)
