"""The one exception of the client: a call that the server, or the way to it, did not complete."""

from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

_DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"


class CallFailed(Exception):
    """A call that failed.

    `code` is the gRPC status, `reason` the server's constant for it ("QUEUE_FULL"; empty when the
    connection failed), `violations` maps a field's path in the protocol to what is wrong with it,
    `metadata` holds what the reason says further. `retry_after_s` is the server's hint. UNAVAILABLE means
    that nothing was delivered and the call may be repeated, ABORTED that output was delivered.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        request_id: str = "",
        retry_after_s: float | None = None,
        violations: dict[str, str] | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(f"{code.name}{f' ({reason})' if reason else ''}: {message}")
        self.code, self.message, self.reason, self.request_id = code, message, reason, request_id
        self.retry_after_s = retry_after_s
        self.violations = violations or {}
        self.metadata = metadata or {}


def read_failure(error: grpc.RpcError) -> CallFailed:
    """Return the typed form of a gRPC error, with the details that the server attached."""
    # The error of a call is the call itself, or an AioRpcError, which has the same methods.
    call: Any = error
    code, message = call.code(), call.details() or ""
    trailers: dict[str, str | bytes] = dict(call.trailing_metadata() or ())
    failure = CallFailed(code, message, retry_after_s=_pushback(trailers.get(_PUSHBACK_KEY)))
    details = trailers.get(_DETAILS_KEY)
    if isinstance(details, bytes):
        _add_details(failure, status_pb2.Status.FromString(details))
    return failure


def after_output(failure: CallFailed) -> CallFailed:
    """Return a failure as a caller who has output already gets it: ABORTED for UNAVAILABLE, which says that
    there was none. A server that lives says so itself; of one that died gRPC knows only that it is away.
    """
    if failure.code is not grpc.StatusCode.UNAVAILABLE:
        return failure
    return CallFailed(
        grpc.StatusCode.ABORTED,
        f"the stream broke after output was delivered: {failure.message}",
        reason=failure.reason,
        request_id=failure.request_id,
        retry_after_s=failure.retry_after_s,
        violations=failure.violations,
        metadata=failure.metadata,
    )


def _add_details(failure: CallFailed, status: status_pb2.Status) -> None:
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    request = error_details_pb2.RequestInfo()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(info):
            failure.reason, failure.metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(bad):
            failure.violations = {one.field: one.description for one in bad.field_violations}
        elif detail.Unpack(request):
            failure.request_id = request.request_id
        elif detail.Unpack(retry):
            failure.retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    if failure.reason:
        failure.args = (f"{failure.code.name} ({failure.reason}): {failure.message}",)


def _pushback(value: str | bytes | None) -> float | None:
    if isinstance(value, str) and value.lstrip("-").isdigit():
        return int(value) / 1000 if int(value) >= 0 else None
    return None
