"""``diptych.v1.InferenceService`` on a gRPC server: one handler per RPC, none of them with logic of its own.

Requests arrive as bytes and are parsed inside the handlers: what gRPC's own deserializers answer to garbage
is UNKNOWN with an exception's text. Handlers write to the context instead of yielding, which costs a task
less and puts the outermost catch in one place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from diptych.v1 import inference_pb2
from gateway.call import SERVICE, Call, Calls, Context
from gateway.generate import Generator
from gateway.text_rpcs import TextRpcs

Unary = Callable[[bytes, Call], Awaitable[Message]]
Streaming = Callable[[bytes, Call], Awaitable[None]]


def add_inference_service(
    server: grpc.aio.Server, calls: Calls, generator: Generator, text: TextRpcs
) -> None:
    """Register every RPC of the public service."""
    handlers = {
        "StreamGenerate": _streaming("StreamGenerate", calls, generator.stream),
        "Generate": _unary("Generate", calls, generator.whole),
        "Tokenize": _unary("Tokenize", calls, text.tokenize),
        "Detokenize": _unary("Detokenize", calls, text.detokenize),
        "ListModels": _unary("ListModels", calls, text.list_models),
        "GetModel": _unary("GetModel", calls, text.get_model),
        "CancelRequest": _unary("CancelRequest", calls, text.cancel_request),
    }
    declared = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name
    if handlers.keys() != set(declared):
        raise RuntimeError(f"RPCs without a handler, or the reverse: {handlers.keys() ^ set(declared)}")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _unary(method: str, calls: Calls, body: Unary) -> grpc.RpcMethodHandler[Any, Any]:
    async def handle(data: bytes, context: Context) -> Message:
        return await calls.run(method, context, lambda call: body(data, call))

    return grpc.unary_unary_rpc_method_handler(handle, response_serializer=_serialize)


def _streaming(method: str, calls: Calls, body: Streaming) -> grpc.RpcMethodHandler[Any, Any]:
    async def handle(data: bytes, context: Context) -> None:
        await calls.run(method, context, lambda call: body(data, call))

    return grpc.unary_stream_rpc_method_handler(handle, response_serializer=_serialize)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
