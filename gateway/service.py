"""``diptych.v1.InferenceService`` on a gRPC server: one handler per RPC, none of them with logic of its own.

Requests arrive as bytes and are parsed inside the handlers: what gRPC's own deserializers answer to garbage
is UNKNOWN with an exception's text. Handlers write to the context instead of yielding, which costs a task
less and puts the outermost catch in one place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from diptych.v1 import inference_pb2 as pb
from gateway.call import Calls
from gateway.generate import Generator
from gateway.grpc_call import Context, GrpcCall, serve
from gateway.text_rpcs import TextRpcs
from gateway.validation import parse_message

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name

R = TypeVar("R", bound=Message)
Body = Callable[[R, GrpcCall], Awaitable[Message | None]]


def add_inference_service(
    server: grpc.aio.Server, calls: Calls, generator: Generator, text: TextRpcs
) -> None:
    """Register every RPC of the public service."""
    handlers = {
        "StreamGenerate": _handler("StreamGenerate", calls, pb.GenerateRequest, generator.stream),
        "Generate": _handler("Generate", calls, pb.GenerateRequest, generator.whole),
        "Tokenize": _handler("Tokenize", calls, pb.TokenizeRequest, _plain(text.tokenize)),
        "Detokenize": _handler("Detokenize", calls, pb.DetokenizeRequest, _plain(text.detokenize)),
        "ListModels": _handler("ListModels", calls, pb.ListModelsRequest, _plain(text.list_models)),
        "GetModel": _handler("GetModel", calls, pb.GetModelRequest, _plain(text.get_model)),
        "CancelRequest": _handler(
            "CancelRequest", calls, pb.CancelRequestRequest, _plain(text.cancel_request)
        ),
    }
    declared = pb.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name
    if handlers.keys() != set(declared):
        raise RuntimeError(f"RPCs without a handler, or the reverse: {handlers.keys() ^ set(declared)}")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _plain(body: Callable[[R], Awaitable[Message]]) -> Body[R]:
    """For what needs to know nothing of its call."""
    return lambda request, _: body(request)


def _handler(rpc: str, calls: Calls, kind: type[R], body: Body[R]) -> grpc.RpcMethodHandler[Any, Any]:
    method = f"{SERVICE}/{rpc}"

    async def handle(data: bytes, context: Context) -> Any:
        call = GrpcCall(method, context, calls.clock())

        async def answer() -> Message | None:
            return await body(parse_message(kind, data), call)

        return await serve(calls, call, answer)

    declared = pb.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name[rpc]
    make = (
        grpc.unary_stream_rpc_method_handler
        if declared.server_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make(handle, response_serializer=_serialize)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
