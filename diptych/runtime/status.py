"""Errors as gRPC statuses with rich details (google.rpc, in the trailer grpc-status-details-bin).

Source: https://google.aip.dev/193 and google/rpc/error_details.proto. Every status carries ErrorInfo
and RequestInfo. A retry hint is given twice, as RetryInfo for people and as the trailer
grpc-retry-pushback-ms, which is the only one that gRPC's own retry policies obey (gRFC A6).
"""

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from diptych.runtime.errors import DiptychError, Internal, QuotaExceeded, printable

DOMAIN = "diptych"
DETAILS_TRAILER = "grpc-status-details-bin"
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"
REQUEST_ID_TRAILER = "x-request-id"

MAX_MESSAGE_BYTES = 1024
MAX_DETAILS_BYTES = 4096
_MAX_DESCRIPTION = 512

_log = logging.getLogger(__name__)

Trailers = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True)
class RpcStatus:
    """Status and trailers of a failed RPC."""

    code: grpc.StatusCode
    message: str
    status: status_pb2.Status
    trailers: Trailers


def to_status(error: BaseException, request_id: str) -> RpcStatus:
    """Return the status of an error.

    Anything but a DiptychError is a bug and becomes Internal, without its text.
    """
    known = error if isinstance(error, DiptychError) else Internal()
    request_id = printable(request_id)
    message = _cut(known.message, MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=known.code.value[0], message=message)
    for detail in _details(known, request_id):
        packed = status.details.add()
        packed.Pack(detail)
        if status.ByteSize() > MAX_DETAILS_BYTES:
            del status.details[-1]
    trailers: list[tuple[str, str | bytes]] = [(DETAILS_TRAILER, status.SerializeToString())]
    if request_id:
        trailers.append((REQUEST_ID_TRAILER, request_id))
    if known.retry_after_s is not None:
        trailers.append((PUSHBACK_TRAILER, str(math.ceil(known.retry_after_s * 1000))))
    return RpcStatus(known.code, message, status, tuple(trailers))


def _details(error: DiptychError, request_id: str) -> list[Message]:
    """Most important first: what does not fit is left out from the end."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata),
        error_details_pb2.RequestInfo(request_id=request_id),
    ]
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(math.ceil(error.retry_after_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, QuotaExceeded):
        failure = error_details_pb2.QuotaFailure()
        failure.violations.add(subject=error.subject, description=f"at most {error.quota}")
        details.append(failure)
    if error.resource is not None:
        details.append(
            error_details_pb2.ResourceInfo(
                resource_type=error.resource.type,
                resource_name=error.resource.name,
                description=error.message,
            )
        )
    if error.violations:
        bad = error_details_pb2.BadRequest()
        for violation in error.violations:
            bad.field_violations.add(
                field=_cut(violation.field, _MAX_DESCRIPTION),
                description=_cut(violation.description, _MAX_DESCRIPTION),
                reason=error.reason,
            )
            if bad.ByteSize() > MAX_DETAILS_BYTES // 2:
                del bad.field_violations[-1]
                break
        details.append(bad)
    return details


def _cut(text: str, limit: int) -> str:
    """Return at most `limit` bytes of UTF-8, whole characters."""
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")


async def abort(
    context: "grpc.aio.ServicerContext[Any, Any]", error: BaseException, request_id: str
) -> NoReturn:
    """End the RPC with the error's status: the one outermost catch of a handler calls this.

    Raises grpc.aio.AbortError, as `context.abort` does. A cancellation is re-raised instead: swallowed,
    the call would leak. An error that is no DiptychError is logged here, with its traceback.
    """
    if isinstance(error, asyncio.CancelledError | grpc.aio.AbortError):
        raise error
    if not isinstance(error, DiptychError):
        _log.error("request %s: unexpected error", request_id, exc_info=error)
    status = to_status(error, request_id)
    await context.abort(status.code, status.message, status.trailers)
    raise AssertionError("context.abort returned")
