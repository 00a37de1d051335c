"""Cross-origin resource sharing: pages of the allowed origins may call the API from a browser.

Source: Fetch Standard, 3.3 (HTTP extensions). Without allowed origins nothing of it is in the answers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

from aiohttp import hdrs, web

HEADERS: Final = web.RequestKey("cors_headers", dict[str, str])
"""Key of a request under which the headers of its answer are."""
_ANY: Final = "*"
_HEADER_NAMES: Final = re.compile(r"[A-Za-z0-9_, -]{1,1024}")
_MAX_AGE_S: Final = 600


class AllowedOrigins:
    """Origins whose pages may read answers."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)

    def allowed_origin(self, request: web.BaseRequest) -> str:
        """Return the origin to allow in the answer to a request, "" for none."""
        origin = request.headers.get(hdrs.ORIGIN, "")
        if not origin or _ANY in self._origins:
            return _ANY if origin and self._origins else ""
        return origin if origin in self._origins else ""


def response_headers(origin: str) -> dict[str, str]:
    """Return the headers of any answer to a page of ``origin``."""
    headers: dict[str, str] = {
        hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: origin,
        hdrs.ACCESS_CONTROL_EXPOSE_HEADERS: "x-request-id, x-model-digest, x-diptych-fallback, retry-after",
    }
    return headers if origin == _ANY else {**headers, hdrs.VARY: hdrs.ORIGIN}


def preflight_headers(request: web.BaseRequest, methods: Sequence[str]) -> dict[str, str]:
    """Return the headers that allow a request of these methods with the headers that the page asks for."""
    wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
    headers: dict[str, str] = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: ", ".join(methods),
        hdrs.ACCESS_CONTROL_MAX_AGE: str(_MAX_AGE_S),
    }
    if _HEADER_NAMES.fullmatch(wanted):
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = wanted
    return headers
