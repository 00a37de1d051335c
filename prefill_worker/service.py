"""The edge of the prefill worker: gateways link here."""

from __future__ import annotations

from collections.abc import Callable

from diptych.worker.v1 import prefill_pb2, work_pb2
from diptych.worker_process.gateway_link import GatewayLinks, drain_grace_s
from kvtransfer.drivers.codec import key_of
from prefill_worker.engine_loop import EngineLoop
from prefill_worker.gateway_stream import GatewayStream

Request = prefill_pb2.PrefillServiceLinkRequest


def gateway_links(
    loop: EngineLoop, hello: work_pb2.WorkerHello, drain: Callable[[float | None], None]
) -> GatewayLinks[GatewayStream]:
    """Dispatch and cancel in, last words and heartbeats out; `drain` hears the grace in seconds, if any."""

    def heard(message: Request, gateway: GatewayStream) -> None:
        match message.WhichOneof("message"):
            case "dispatch":
                loop.attempts.dispatch(message.dispatch, gateway)
            case "cancel":
                loop.attempts.cancel(key_of(message.cancel.id), message.cancel.choices)
            case "flush":
                gateway.flushed(message.flush.id, loop.flush_prefix_cache())
            case "drain":
                drain(drain_grace_s(message.drain))

    greeting = prefill_pb2.PrefillServiceLinkResponse(hello=hello)
    return GatewayLinks(greeting, GatewayStream, heard, loop.attempts.gateway_lost)
