"""Errors as clients of both APIs get them, checked for the form that every error has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

MAX_MESSAGE_BYTES, MAX_DETAILS_BYTES = 1024, 4096
SECRET = "xyzzy-plugh"
"""In prompts and bad values; nothing that the server says may hold it."""


@dataclass
class Told:
    """The rich details of an error over gRPC."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)
    resource: tuple[str, str] | None = None
    request_id: str = ""
    retry_s: float | None = None


def told(error: Any) -> Told:
    """Fails unless the error has the form that the contract gives it."""
    status = rpc_status.from_call(error)
    assert status is not None, f"{error.code()} without details: {error.details()}"
    trailers = dict(error.trailing_metadata())
    assert len(status.message.encode()) <= MAX_MESSAGE_BYTES
    assert status.ByteSize() <= MAX_DETAILS_BYTES
    assert status.message == error.details()
    assert SECRET not in f"{status} {trailers}"
    assert "Traceback" not in status.message
    found = _unpacked(status, Told(error.code(), status.message))
    pushback = trailers.get("grpc-retry-pushback-ms")
    # A hint is given twice, and as the same time.
    assert (pushback is None) == (found.retry_s is None)
    if pushback is not None:
        assert int(pushback) == round((found.retry_s or 0.0) * 1000) > 0
    assert trailers.get("x-request-id", "") == found.request_id
    return found


def _unpacked(status: status_pb2.Status, found: Told) -> Told:
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    request, retry = error_details_pb2.RequestInfo(), error_details_pb2.RetryInfo()
    resource = error_details_pb2.ResourceInfo()
    kinds = set()
    for detail in status.details:
        kinds.add(detail.TypeName())
        if detail.Unpack(info):
            assert info.domain == "diptych"
            found.reason, found.metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(bad):
            found.fields = [violation.field for violation in bad.field_violations]
            assert all(violation.description for violation in bad.field_violations)
        elif detail.Unpack(request):
            found.request_id = request.request_id
        elif detail.Unpack(retry):
            found.retry_s = retry.retry_delay.ToNanoseconds() / 1e9
        elif detail.Unpack(resource):
            found.resource = (resource.resource_type, resource.resource_name)
    assert {"google.rpc.ErrorInfo", "google.rpc.RequestInfo"} <= kinds
    return found


def check_http(status: int, body: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the error object in OpenAI's form; fail unless it is one."""
    found: dict[str, Any] = json.loads(body)
    assert set(found) == {"error"}
    error: dict[str, Any] = found["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    assert len(error["message"].encode()) <= MAX_MESSAGE_BYTES
    assert len(body.encode()) <= MAX_DETAILS_BYTES
    assert SECRET not in f"{body} {dict(headers)}"
    assert ("Retry-After" in headers) == ("retry-after-ms" in headers)
    return error


TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
