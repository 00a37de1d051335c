"""gRPC call as the core sees it, and its end as a gRPC status, for every gRPC service of the gateway.

Nothing that a handler raises reaches gRPC itself, which would send its text to the client. A client's
cancel and its deadline both arrive as CancelledError; the clock tells them apart, and both are re-raised.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from diptych.runtime import trace_context
from diptych.runtime.errors import DiptychError
from diptych.runtime.status import REQUEST_ID_TRAILER, abort
from diptych.v1 import inference_pb2 as pb
from gateway.access.caller import Caller
from gateway.call import Call, Calls

T = TypeVar("T")
AUTHORIZATION = "authorization"
Context = grpc.aio.ServicerContext[Any, Any]


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
        await self.context.write(message)

    def on_request_id(self, request_id: str) -> None:
        """Set trailing metadata: leading metadata would commit the RPC before its first message."""
        self.context.set_trailing_metadata(((REQUEST_ID_TRAILER, request_id),))


async def serve(calls: Calls, call: GrpcCall, body: Callable[[], Awaitable[T]]) -> T:
    """Return the body's result, or abort the RPC with the status of what it raised."""
    try:
        with calls.account(call):
            return await body()
    except DiptychError as error:
        await abort(call.context, error, call.request_id)
