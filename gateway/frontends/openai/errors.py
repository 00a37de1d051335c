"""Errors in OpenAI's shape: a status, ``{"error": {message, type, param, code}}``, and when to try again.

``code`` is the reason of our own errors in lower case, but for the one that OpenAI's clients know by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import grpc

from diptych.runtime.errors import DiptychError
from gateway.frontends.openai.request_builder import param_of

CLIENT_CLOSED_REQUEST: Final = 499  # nginx's number; no standard has one

STATUS: Final[Mapping[grpc.StatusCode, int]] = {
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    grpc.StatusCode.CANCELLED: CLIENT_CLOSED_REQUEST,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.ABORTED: HTTPStatus.INTERNAL_SERVER_ERROR,
    grpc.StatusCode.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
}
_TYPES: Final[Mapping[int, str]] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.CONFLICT: "conflict_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
_CODES: Final[Mapping[str, str]] = {"UNKNOWN_MODEL": "model_not_found"}
# openai-python 3 shows the message alone, and what is built on it (LangChain) looks there for the code.
_CODE_IN_MESSAGE: Final = frozenset(["CONTEXT_LENGTH_EXCEEDED"])


@dataclass(frozen=True, slots=True)
class HttpError:
    """Response to a request that failed. ``body`` is the object with the one member ``error``."""

    status: int
    body: bytes
    headers: Mapping[str, str]


def status_of(code: grpc.StatusCode) -> int:
    return HTTPStatus.OK if code is grpc.StatusCode.OK else STATUS.get(code, HTTPStatus.INTERNAL_SERVER_ERROR)


def http_error(error: DiptychError, names: Mapping[str, str] | None) -> HttpError:
    """Build the response.

    Args:
        error: of the core.
        names: what the client called the fields of the core (`param_of`); None: the error has the client's
            own name, since it is of the body and not of the core.
    """
    status = status_of(error.code)
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
        headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if status == HTTPStatus.CONFLICT:
        # OpenAI's clients try again after a 409. The same id would meet the same request.
        headers["x-should-retry"] = "false"
    return HttpError(status, json.dumps(error_object(error, names)).encode(), headers)


def error_object(error: DiptychError, names: Mapping[str, str] | None) -> dict[str, Any]:
    message, param = error.message, None
    if error.violations:
        first = error.violations[0]
        param = first.field if names is None else param_of(first.field, names)
        # A message of the error's own is one that clients look for as it is.
        message = f"{param}: {first.description}" if message != first.description else message
    code = _CODES.get(error.reason, error.reason.lower())
    if error.reason in _CODE_IN_MESSAGE:
        message = f"{message} ({code})"
    return plain_error(status_of(error.code), message, code, param)


def plain_error(status: int, message: str, code: str, param: str | None = None) -> dict[str, Any]:
    """Build an error that the core has no part in: of paths, methods, sizes."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
