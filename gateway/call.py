"""What every RPC has around it: the request id, the deadline, the SERVER span, and the one outermost catch.

Nothing that a handler raises reaches gRPC itself, which would send its text to the client. A client's
cancel and its deadline both arrive as CancelledError; the clock tells them apart, and both are re-raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from runtime.errors import DiptychError, Internal
from runtime.metrics import GatewayMetrics
from runtime.status import REQUEST_ID_TRAILER, abort
from runtime.telemetry import ServerSpan, Telemetry

SERVICE = "diptych.v1.InferenceService"
_NO_DEADLINE_S = 30 * 24 * 3600.0  # gRPC says "infinite" as a very large number in some versions
_CLOCK_SKEW_S = 0.02  # gRPC's timer fires a few milliseconds off this clock
_REJECTIONS = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE})

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]


class Call:
    """One RPC while it runs. Times are on the gateway's monotonic clock."""

    def __init__(self, context: Context, span: ServerSpan, received_at: float) -> None:
        self.context = context
        self.span = span
        self.received_at = received_at
        metadata = dict(context.invocation_metadata() or ())
        header = metadata.get(REQUEST_ID_TRAILER, "")
        self.header_request_id = header if isinstance(header, str) else ""
        self.request_id = ""  # once known; goes into the trailers
        left = context.time_remaining()
        self.deadline = received_at + left if left is not None and left < _NO_DEADLINE_S else None

    def time_left_s(self, now: float) -> float | None:
        return None if self.deadline is None else max(self.deadline - now, 0.0)

    def why_cancelled(self, now: float) -> grpc.StatusCode:
        """What a CancelledError in the handler means."""
        passed = self.deadline is not None and now >= self.deadline - _CLOCK_SKEW_S
        return grpc.StatusCode.DEADLINE_EXCEEDED if passed else grpc.StatusCode.CANCELLED

    def answer_with_id(self, request_id: str) -> None:
        """Name the request in the trailing metadata; leading metadata would commit the RPC too early."""
        self.request_id = request_id
        self.context.set_trailing_metadata(((REQUEST_ID_TRAILER, request_id),))


class Calls:
    """Runs the body of each RPC with all of that around it."""

    def __init__(self, telemetry: Telemetry, metrics: GatewayMetrics, clock: Callable[[], float]) -> None:
        self._telemetry = telemetry
        self._metrics = metrics
        self._clock = clock

    async def run(self, method: str, context: Context, body: Callable[[Call], Awaitable[T]]) -> T:
        """The body's result, or the RPC aborted with the status of what it raised."""
        received_at = self._clock()
        metadata = context.invocation_metadata()
        span = self._telemetry.start_server_span(f"{SERVICE}/{method}", _pairs(metadata))
        call = Call(context, span, received_at)
        code, reason = grpc.StatusCode.OK, None
        try:
            return await body(call)
        except asyncio.CancelledError:
            code = call.why_cancelled(self._clock())
            raise
        except Exception as error:
            known = error if isinstance(error, DiptychError) else Internal()
            code, reason = known.code, known.reason
            if code in _REJECTIONS:
                self._metrics.rejections.labels(reason).inc()
            await abort(context, error, call.request_id or call.header_request_id)
        finally:
            span.end(code, reason)
            self._metrics.call_duration.labels(f"{SERVICE}/{method}", code.name).observe(
                self._clock() - received_at
            )


def _pairs(metadata: Any) -> list[tuple[str, str | bytes]]:
    return [(key, value) for key, value in metadata or ()]
