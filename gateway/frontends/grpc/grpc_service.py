"""Any gRPC service of the gateway: its RPCs as plain functions, with everything around them.

Requests arrive as bytes and are parsed inside the handlers: what gRPC's own deserializers answer to garbage
is UNKNOWN with an exception's text. Handlers write to the context instead of yielding, which costs a task
less and puts the outermost catch in one place.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from gateway.access.access import Caller, anonymous
from gateway.call import Calls
from gateway.frontends.grpc.grpc_call import GrpcCall, serve
from gateway.frontends.grpc.stream_end import Context
from gateway.request.validation import parse_message

Body = Callable[[Any, GrpcCall], Awaitable[Message | None]]
"""One RPC: takes its parsed request, returns the answer; a streaming one writes, and returns nothing."""

Stream = Callable[[AsyncIterator[bytes], Context], Awaitable[None]]
"""An RPC with a stream of requests: takes them as bytes, accounts for each itself, writes to the context."""


def plain(body: Callable[[Any], Awaitable[Message]]) -> Body:
    """For what needs to know nothing of its call."""
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
    """Register RPCs by their names; those of ``without_key`` are open to everybody.

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
