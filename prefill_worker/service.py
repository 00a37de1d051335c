"""The gRPC edge of the prefill worker: gateways link here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from diptych.worker.v1 import prefill_pb2, prefill_pb2_grpc, work_pb2
from kvtransfer.wire import key_of
from prefill_worker.engine_loop import EngineLoop
from prefill_worker.gateway_stream import GatewayStream
from worker.gateway_link import Context, GatewayLinks, drain_grace_s

Request = prefill_pb2.PrefillServiceLinkRequest


def gateway_links(
    loop: EngineLoop, hello: work_pb2.WorkerHello, drain: Callable[[float | None], None]
) -> GatewayLinks[GatewayStream]:
    """Dispatch and cancel in, last words and heartbeats out; `drain` hears the grace in seconds, if any."""

    def heard(message: Request, gateway: GatewayStream) -> None:
        match message.WhichOneof("message"):
            case "dispatch":
                loop.dispatch(message.dispatch, gateway)
            case "cancel":
                loop.cancel(key_of(message.cancel.id), message.cancel.choices)
            case "drain":
                drain(drain_grace_s(message.drain))

    greeting = prefill_pb2.PrefillServiceLinkResponse(hello=hello)
    return GatewayLinks(greeting, GatewayStream, heard, loop.gateway_lost)


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """One stream per gateway."""

    def __init__(self, links: GatewayLinks[GatewayStream]) -> None:
        self._links = links

    async def Link(self, requests: AsyncIterator[Request], context: Context) -> None:
        await self._links.serve(requests, context)
