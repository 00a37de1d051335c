"""The edge of the decode worker for gateways; prefill workers link to the handoff's own service."""

from __future__ import annotations

from collections.abc import Callable

from decode_worker.engine_loop import EngineLoop
from decode_worker.gateway_stream import GatewayStream
from diptych.worker.v1 import decode_pb2, work_pb2
from diptych.worker_process.gateway_link import GatewayLinks, drain_grace_s
from kvtransfer.drivers.codec import key_of

Request = decode_pb2.DecodeServiceLinkRequest


def gateway_links(
    loop: EngineLoop, hello: work_pb2.WorkerHello, drain: Callable[[float | None], None]
) -> GatewayLinks[GatewayStream]:
    """Attach and cancel in, step batches and heartbeats out; `drain` hears the grace in seconds, if any."""
    attempts = loop.attempts

    def heard(message: Request, gateway: GatewayStream) -> None:
        match message.WhichOneof("message"):
            case "attach":
                attempts.attach(message.attach, gateway)
            case "cancel":
                attempts.cancel(key_of(message.cancel.id), message.cancel.choices)
            case "drain":
                drain(drain_grace_s(message.drain))
            case "flush":
                gateway.flushed(message.flush.id, loop.flush_prefix_cache())

    greeting = decode_pb2.DecodeServiceLinkResponse(hello=hello)
    return GatewayLinks(greeting, GatewayStream, heard, attempts.gateway_lost)
