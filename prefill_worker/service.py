"""The gRPC edge of the prefill worker: gateways link here."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from diptych.worker.v1 import prefill_pb2, prefill_pb2_grpc, work_pb2
from kvtransfer.messages import Key
from prefill_worker.engine_loop import EngineLoop
from prefill_worker.gateway_stream import GatewayStream
from worker.gateway_link import duplex, first_message

Context = grpc.aio.ServicerContext[
    prefill_pb2.PrefillServiceLinkRequest, prefill_pb2.PrefillServiceLinkResponse
]


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """One stream per gateway: dispatch and cancel in, last words and heartbeats out."""

    def __init__(self, loop: EngineLoop, streams: set[GatewayStream], hello: work_pb2.WorkerHello) -> None:
        self._loop = loop
        self._streams = streams
        self._hello = hello

    async def Link(
        self, requests: AsyncIterator[prefill_pb2.PrefillServiceLinkRequest], context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillServiceLinkResponse]:
        hello = (await first_message(requests, "hello", context)).hello
        gateway = GatewayStream(hello.gateway_id)
        self._streams.add(gateway)

        def lost() -> None:
            self._streams.discard(gateway)
            self._loop.gateway_lost(gateway)

        def on_message(message: prefill_pb2.PrefillServiceLinkRequest) -> None:
            match message.WhichOneof("message"):
                case "dispatch":
                    self._loop.dispatch(message.dispatch, gateway)
                case "cancel":
                    self._loop.cancel(_key(message.cancel.id))

        yield prefill_pb2.PrefillServiceLinkResponse(hello=self._hello)
        async for reply in duplex(requests, gateway.messages(), on_message, lost):
            yield reply


def _key(attempt: work_pb2.AttemptId) -> Key:
    return (attempt.request_id, attempt.attempt)
