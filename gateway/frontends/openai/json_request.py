"""The body of an HTTP request, and what is answered to one that is not read."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Final

from aiohttp import hdrs, web

from diptych.runtime.http_edge import read_body
from gateway import limits
from gateway.frontends.openai.errors import plain_error

_BODY_S: Final = 30.0  # a body of the largest size over 1 Mbit/s


async def read_json(request: web.BaseRequest, max_bytes: int = limits.MAX_BODY_BYTES) -> bytes | web.Response:
    """Return the body, of at most `max_bytes`, or the response that says why it is not read."""
    if request.content_type != "application/json":
        return refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Content-Type must be application/json", "not_json")
    return await read_bytes(request, max_bytes)


async def read_bytes(request: web.BaseRequest, max_bytes: int) -> bytes | web.Response:
    """Return a body of any type, as `read_json` does."""
    if request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity":
        return refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "compressed bodies are not read", "compressed_body")
    too_large = f"the body must be at most {max_bytes} bytes"
    if (request.content_length or 0) > max_bytes:
        return refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, too_large, "body_too_large")
    try:
        return await read_body(request, _BODY_S)
    except web.HTTPRequestEntityTooLarge:
        return refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, too_large, "body_too_large")
    except web.RequestPayloadError:
        return refuse(HTTPStatus.BAD_REQUEST, "the body is malformed", "malformed_body")
    except TimeoutError:
        return refuse(HTTPStatus.REQUEST_TIMEOUT, f"no whole body within {_BODY_S:g} s", "body_too_slow")


def refuse(status: HTTPStatus, message: str, code: str) -> web.Response:
    return json_response(plain_error(status, message, code), status)


def json_response(value: object, status: int = HTTPStatus.OK) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), status=status, content_type="application/json")
