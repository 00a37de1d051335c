"""``inference.GRPCInferenceService``: the RPCs, over the same core as every frontend.

ModelStreamInfer runs the requests of a stream side by side, as Triton does for models that answer more than
once. An error of one of them is an ``error_message`` with its id and leaves the others alone; the stream ends
when the client has closed its side and every answer is out, or with the RPC's own deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from diptych import __version__
from diptych.kserve.v2 import open_inference_pb2 as oip
from diptych.runtime.errors import DiptychError, SlowReader
from diptych.runtime.task_cancellation import end_task
from diptych.v1 import inference_pb2 as pb
from gateway.call import Calls
from gateway.frontends.grpc.grpc_service import Body, GrpcCall, add_service, write
from gateway.frontends.grpc.stream_end import Context, end_with, limit_end
from gateway.frontends.kserve import answer
from gateway.frontends.kserve.models import config_of, find_model, metadata_of
from gateway.frontends.kserve.request import InferGenerateRequest, read_request, with_client_field
from gateway.request.validation import parse_message
from gateway.served_models.router import ModelRouter

DESCRIPTOR = oip.DESCRIPTOR.services_by_name["GRPCInferenceService"]
SERVICE = DESCRIPTOR.full_name
STREAM_INFER: Final = f"{SERVICE}/ModelStreamInfer"
MAX_RUNNING: Final = 256  # requests of one stream; a client that sends more waits


class KServeServicer:
    """RPCs of the protocol; one object serves all calls.

    Args:
        ready: returns whether a request that comes now has workers, of any model.
    """

    def __init__(self, calls: Calls, router: ModelRouter, ready: Callable[[], bool]) -> None:
        self._calls = calls
        self._router = router
        self._ready = ready

    def register(self, server: grpc.aio.Server) -> None:
        """Add every RPC to the public server."""
        bodies: dict[str, Body] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelInfer": self._model_infer,
        }
        add_service(
            server,
            self._calls,
            DESCRIPTOR,
            bodies,
            streams={"ModelStreamInfer": self._stream},
            without_key=frozenset({"ServerLive", "ServerReady"}),  # as /health and /ready
        )

    async def _server_live(self, _: Message, __: GrpcCall) -> Message:
        return oip.ServerLiveResponse(live=True)

    async def _server_ready(self, _: Message, __: GrpcCall) -> Message:
        return oip.ServerReadyResponse(ready=self._ready())

    async def _model_ready(self, request: oip.ModelReadyRequest, call: GrpcCall) -> Message:
        core, _ = find_model(self._router, request.name, request.version, call.caller)
        return oip.ModelReadyResponse(ready=self._ready() and not core.why_not_ready())

    async def _server_metadata(self, _: Message, __: GrpcCall) -> Message:
        return oip.ServerMetadataResponse(name="diptych", version=__version__)

    async def _model_metadata(self, request: oip.ModelMetadataRequest, call: GrpcCall) -> Message:
        return metadata_of(*find_model(self._router, request.name, request.version, call.caller))

    async def _model_config(self, request: oip.ModelConfigRequest, call: GrpcCall) -> Message:
        found = find_model(self._router, request.name, request.version, call.caller)
        return oip.ModelConfigResponse(config=config_of(*found))

    async def _model_infer(self, message: oip.ModelInferRequest, call: GrpcCall) -> Message:
        asked = read_request(message, streaming=False)
        _limit_time(call, asked)
        try:
            return answer.whole(await self._router.collect(asked.request, call), asked)
        except DiptychError as error:
            raise with_client_field(error, asked.names) from error

    async def _stream(self, messages: AsyncIterator[bytes], context: Context) -> None:
        """Read requests and answer each in a task of its own, all through one writer."""
        handler = asyncio.current_task()
        if handler is None:
            raise RuntimeError("an RPC without a task")
        shared = SharedStream(context, handler)
        places = asyncio.Semaphore(MAX_RUNNING)
        running: set[asyncio.Task[None]] = set()
        try:
            async for data in messages:
                await places.acquire()
                task = asyncio.create_task(self._one(data, shared), name="kserve request")
                running.add(task)
                task.add_done_callback(running.discard)
                task.add_done_callback(lambda _: places.release())
            if running:
                await asyncio.gather(*running)
        except asyncio.CancelledError:
            if shared.unread is None:
                raise
            shared.handler.uncancel()
        finally:
            for task in list(running):
                await end_task(task)
            shared.close()
        if (error := shared.unread or shared.overdue) is not None:
            await end_with(context, error, "", self._calls.heap)
        limit_end(context, "", self._calls.write_timeout_s, self._calls.heap)

    async def _one(self, data: bytes, shared: SharedStream) -> None:
        """Serve a request of a stream, from its bytes to its last response."""
        call = StreamedCall(shared, self._calls.clock())
        names: dict[str, str] = {}
        try:
            with self._calls.account(call):
                message = parse_message(oip.ModelInferRequest, data)
                call.request_id = message.id
                call.asked = asked = read_request(message, streaming=True)
                _limit_time(call, asked)
                names = asked.names
                if asked.stream:
                    await self._router.stream(asked.request, call)
                else:
                    await call.write(await self._router.collect(asked.request, call))
        except SlowReader as error:
            shared.end_unread(error)
        except DiptychError as error:
            await call.fail(with_client_field(error, names))


def _limit_time(call: GrpcCall, asked: InferGenerateRequest) -> None:
    """Apply the request's own timeout, where it is shorter than what the RPC has left."""
    if asked.timeout_s is not None:
        deadline = call.received_at + asked.timeout_s
        call.deadline = deadline if call.deadline is None else min(call.deadline, deadline)


class SharedStream:
    """Writer and end of a stream, shared by its requests.

    Attributes:
        overdue: how one of them ended for lack of the RPC's own time. The gateway's clock may show it before
            gRPC's does, and such a stream must not end as if all had been answered.
        unread: how one of them ended because the client does not read. All end with it.
    """

    def __init__(self, context: Context, handler: asyncio.Task[Any]) -> None:
        self.context = context
        self.overdue: DiptychError | None = None
        self.unread: SlowReader | None = None
        self.handler = handler
        self._turn = asyncio.Lock()
        self._write: asyncio.Task[None] | None = None

    async def send(self, response: oip.ModelStreamInferResponse) -> None:
        """Write a response. A request that is cancelled meanwhile leaves its response to be written."""
        async with self._turn:  # gRPC takes one message at a time
            if self._write is not None:
                await asyncio.shield(self._write)
            self._write = asyncio.create_task(write(self.context, response), name="kserve response")
            await asyncio.shield(self._write)

    def end_unread(self, error: SlowReader) -> None:
        """End the whole stream: what one request could not write, none can."""
        if self.unread is None:
            self.unread = error
            self.handler.cancel()

    def close(self) -> None:
        """Abandon the response that is being written."""
        if self._write is not None:
            self._write.cancel()


class StreamedCall(GrpcCall):
    """Request of a stream; context, deadline and writer are the stream's."""

    def __init__(self, shared: SharedStream, received_at: float) -> None:
        super().__init__(STREAM_INFER, shared.context, received_at)
        self.header_request_id = ""  # the header is the stream's
        self.request_id = ""
        self.asked: InferGenerateRequest | None = None
        self._shared = shared
        self._rpc_deadline = self.deadline

    def on_request_id(self, request_id: str) -> None:
        """Do nothing: every response carries the id, and trailers belong to the stream."""

    def why_cancelled(self, now: float) -> grpc.StatusCode:
        unread = self._shared.unread
        return super().why_cancelled(now) if unread is None else unread.code

    async def write(self, message: pb.GenerateResponse) -> None:
        if self.asked is None:
            raise RuntimeError("an answer to nothing")
        for response in answer.pieces(message, self.asked, self.request_id):
            await self._shared.send(oip.ModelStreamInferResponse(infer_response=response))

    async def fail(self, error: DiptychError) -> None:
        """Send the error, unless the RPC's deadline ends the stream."""
        own = self.deadline != self._rpc_deadline
        if error.code is grpc.StatusCode.DEADLINE_EXCEEDED and not own:
            self._shared.overdue = error
            return
        response = oip.ModelStreamInferResponse(
            error_message=f"{error.code.name} {error.reason}: {error.message}"
        )
        response.infer_response.id = self.request_id
        response.infer_response.parameters["triton_final_response"].bool_param = True
        await self._shared.send(response)
