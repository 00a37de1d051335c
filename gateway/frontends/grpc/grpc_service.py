"""gRPC services of the gateway: RPCs as plain functions, their calls, and the handlers around them.

Requests arrive as bytes and are parsed inside the handlers: what gRPC's own deserializers answer to garbage
is UNKNOWN with an exception's text. Handlers write to the context instead of yielding, which costs a task
less and puts the outermost catch in one place.

Nothing that a handler raises reaches gRPC itself, which would send its text to the client. A client's cancel
and its deadline both arrive as CancelledError; the clock tells them apart, and both are re-raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from diptych.runtime import trace_context
from diptych.runtime.errors import DiptychError
from diptych.runtime.status import REQUEST_ID_TRAILER
from diptych.v1 import inference_pb2 as pb
from gateway.access.access import Caller, anonymous
from gateway.call import Call, Calls
from gateway.frontends.grpc.stream_end import Context, end_with, limit_end
from gateway.request.validation import parse_message

T = TypeVar("T")
AUTHORIZATION = "authorization"


class GrpcCall(Call):
    """Call of an RPC; ``method`` is its full name: service, slash, RPC."""

    def __init__(
        self, method: str, context: Context, received_at: float, caller: Caller | None = None
    ) -> None:
        self.context = context
        metadata = context.invocation_metadata() or ()
        headers = dict(metadata)
        header = headers.get(REQUEST_ID_TRAILER, "")
        authorization = headers.get(AUTHORIZATION, "")
        super().__init__(
            method,
            received_at=received_at,
            header_request_id=header if isinstance(header, str) else "",
            time_left_s=context.time_remaining(),
            trace=trace_context.from_metadata(metadata),
            authorization=authorization if isinstance(authorization, str) else "",
            caller=caller,
        )

    async def write(self, message: pb.GenerateResponse) -> None:
        await write(self.context, message)

    def on_request_id(self, request_id: str) -> None:
        """Set trailing metadata: leading metadata would commit the RPC before its first message."""
        self.context.set_trailing_metadata(((REQUEST_ID_TRAILER, request_id),))


async def write(context: Context, message: Message) -> None:
    """Write a message of a stream. Raises CancelledError when the RPC has ended."""
    try:
        await context.write(message)
    except grpc.aio.BaseError as error:
        # By the client's cancel or its deadline: a write may fail before the handler is cancelled.
        raise asyncio.CancelledError("the RPC has ended") from error


async def serve(calls: Calls, call: GrpcCall, body: Callable[[], Awaitable[T]]) -> T:
    """Return the body's result, or abort the RPC with the status of what it raised."""
    try:
        with calls.account(call):
            result = await body()
    except DiptychError as error:
        await end_with(call.context, error, call.request_id, calls.heap)
    limit_end(call.context, call.request_id, calls.write_timeout_s, calls.heap)
    return result


Body = Callable[[Any, GrpcCall], Awaitable[Message | None]]
"""Function of an RPC: takes a parsed request, returns the answer; a streaming one writes instead."""

Stream = Callable[[AsyncIterator[bytes], Context], Awaitable[None]]
"""An RPC with a stream of requests: takes them as bytes, accounts for each itself, writes to the context."""


def plain(body: Callable[[Any], Awaitable[Message]]) -> Body:
    """Make an RPC of a function that takes the request only."""
    return lambda request, _: body(request)


def add_service(
    server: grpc.aio.Server,
    calls: Calls,
    service: ServiceDescriptor,
    bodies: Mapping[str, Body],
    *,
    streams: Mapping[str, Stream] | None = None,
    without_key: frozenset[str] = frozenset(),
) -> None:
    """Register RPCs by their names; those of ``without_key`` need no API key.

    Raises RuntimeError unless there is a function for each.
    """
    declared = {method.name: method for method in service.methods}
    handlers = {
        name: _handler(declared[name], calls, body, anonymous() if name in without_key else None)
        for name, body in bodies.items()
    }
    for name, stream in (streams or {}).items():
        handlers[name] = _stream_handler(declared[name], calls, stream)
    if handlers.keys() != declared.keys():
        raise RuntimeError(f"RPCs without a handler, or the reverse: {handlers.keys() ^ declared.keys()}")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def _handler(
    rpc: MethodDescriptor, calls: Calls, body: Body, caller: Caller | None
) -> grpc.RpcMethodHandler[Any, Any]:
    method = f"{rpc.containing_service.full_name}/{rpc.name}"
    kind = GetMessageClass(rpc.input_type)

    async def handle(data: bytes, context: Context) -> Any:
        call = GrpcCall(method, context, calls.clock(), caller)

        async def answer() -> Message | None:
            return await body(parse_message(kind, data), call)

        return await serve(calls, call, answer)

    make = (
        grpc.unary_stream_rpc_method_handler if rpc.server_streaming else grpc.unary_unary_rpc_method_handler
    )
    return make(handle, response_serializer=_serialize)


def _stream_handler(rpc: MethodDescriptor, calls: Calls, stream: Stream) -> grpc.RpcMethodHandler[Any, Any]:
    method = f"{rpc.containing_service.full_name}/{rpc.name}"

    async def handle(messages: AsyncIterator[bytes], context: Context) -> None:
        call = GrpcCall(method, context, calls.clock())
        if not calls.admits(call):
            await serve(calls, call, _nothing)  # counts it, and ends the RPC with the reason
        await stream(messages, context)

    return grpc.stream_stream_rpc_method_handler(handle, response_serializer=_serialize)


async def _nothing() -> None:
    return None


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
