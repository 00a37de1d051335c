"""Errors in Anthropic's shape: ``{"type": "error", "error": {type, message}, "request_id"}``.

They are made from OpenAI's, which every failure of the HTTP port has: statuses, words and hints stay.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from gateway.frontends.openai.http_call import REQUEST_ID

Respond = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_KINDS: Final[Mapping[int, str]] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
# Of an event, which has no status: by the type in OpenAI's shape.
_KINDS_OF_EVENTS: Final[Mapping[str, str]] = {
    "rate_limit_error": "rate_limit_error",
    "service_unavailable_error": "overloaded_error",
    "timeout_error": "timeout_error",
}
_TOO_LONG: Final = "context_length_exceeded"


def anthropic_error(
    error: Mapping[str, Any], status: int | None = None, request_id: str = ""
) -> dict[str, Any]:
    """Return OpenAI's object of an error in Anthropic's shape; without a `status` it is an event's."""
    told = error["error"]
    message = told["message"]
    if told["code"] == _TOO_LONG:
        message = f"prompt is too long: {message}"  # what clients of Anthropic's look for
    if status is None:
        kind = _KINDS_OF_EVENTS.get(told["type"], "api_error")
    else:
        kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    made = {"type": "error", "error": {"type": kind, "message": message}}
    return {**made, "request_id": request_id} if request_id else made


def with_anthropic_errors(respond: Respond) -> Respond:
    """Return the handler with its errors in Anthropic's shape."""

    async def responding(request: web.BaseRequest) -> web.StreamResponse:
        response = await respond(request)
        if (
            response.status < HTTPStatus.BAD_REQUEST
            or response.prepared
            or not isinstance(response, web.Response)
        ):
            return response
        request_id = response.headers.get(REQUEST_ID, "")
        error = json.loads(response.text or "")
        response.body = json.dumps(anthropic_error(error, response.status, request_id)).encode()
        if request_id:
            response.headers["request-id"] = request_id
        return response

    return responding
