"""The gRPC edge of the decode worker for gateways; prefill workers link to the hand-over's own service."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from decode_worker.engine_loop import EngineLoop
from decode_worker.gateway_stream import GatewayStream
from diptych.worker.v1 import decode_pb2, decode_pb2_grpc, work_pb2
from kvtransfer.messages import Key
from worker.gateway_link import duplex, first_message

Context = grpc.aio.ServicerContext[decode_pb2.DecodeServiceLinkRequest, decode_pb2.DecodeServiceLinkResponse]


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """One stream per gateway: attach and cancel in, step batches and heartbeats out."""

    def __init__(self, loop: EngineLoop, streams: set[GatewayStream], hello: work_pb2.WorkerHello) -> None:
        self._loop = loop
        self._streams = streams
        self._hello = hello

    async def Link(
        self, requests: AsyncIterator[decode_pb2.DecodeServiceLinkRequest], context: Context
    ) -> AsyncIterator[decode_pb2.DecodeServiceLinkResponse]:
        hello = (await first_message(requests, "hello", context)).hello
        gateway = GatewayStream(hello.gateway_id)
        self._streams.add(gateway)

        def lost() -> None:
            self._streams.discard(gateway)
            self._loop.gateway_lost(gateway)

        def on_message(message: decode_pb2.DecodeServiceLinkRequest) -> None:
            match message.WhichOneof("message"):
                case "attach":
                    self._loop.attach(message.attach, gateway)
                case "cancel":
                    self._loop.cancel(_key(message.cancel.id))

        yield decode_pb2.DecodeServiceLinkResponse(hello=self._hello)
        async for reply in duplex(requests, gateway.messages(), on_message, lost):
            yield reply


def _key(attempt: work_pb2.AttemptId) -> Key:
    return (attempt.request_id, attempt.attempt)
