"""A gRPC call as the core sees it, and its end in gRPC's words. For every gRPC service of the gateway.

Nothing that a handler raises reaches gRPC itself, which would send its text to the client. A client's
cancel and its deadline both arrive as CancelledError; the clock tells them apart, and both are re-raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from diptych.runtime import trace_context
from diptych.runtime.errors import DiptychError
from diptych.runtime.status import REQUEST_ID_TRAILER
from diptych.v1 import inference_pb2 as pb
from gateway.access.access import Caller
from gateway.call import Call, Calls
from gateway.frontends.grpc.stream_end import Context, end_with, limit_end

T = TypeVar("T")
AUTHORIZATION = "authorization"


class GrpcCall(Call):
    """``method`` is the full name: service, slash, RPC."""

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
        """In the trailing metadata: leading metadata would commit the RPC before its first message."""
        self.context.set_trailing_metadata(((REQUEST_ID_TRAILER, request_id),))


async def write(context: Context, message: Message) -> None:
    """Write a message of a stream. Raises CancelledError when the RPC has ended."""
    try:
        await context.write(message)
    except grpc.aio.BaseError as error:
        # By the client's cancel or its deadline: a write may fail before the handler is cancelled.
        raise asyncio.CancelledError("the RPC has ended") from error


async def serve(calls: Calls, call: GrpcCall, body: Callable[[], Awaitable[T]]) -> T:
    """The body's result, or the RPC aborted with the status of what it raised."""
    try:
        with calls.account(call):
            result = await body()
    except DiptychError as error:
        await end_with(call.context, error, call.request_id, calls.heap)
    limit_end(call.context, call.request_id, calls.write_timeout_s, calls.heap)
    return result
