"""Fallback: requests that no worker can take now go to another OpenAI-compatible server, and say so.

Opt-in, by `--fallback-url`. Only what was refused for lack of workers or room is passed on, before any of its
output: not what is wrong with a request, nor what a key's quota forbids. The answer, stream or whole, is the
other server's own, with the header `x-diptych-fallback`. Where that server cannot be reached, or refuses, the
client gets the error that it would have got without it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import aiohttp
from aiohttp import hdrs, web

from diptych.runtime.errors import DiptychError, Draining, NoReadyWorker, Overloaded
from gateway.frontends.openai import cors
from gateway.frontends.openai.endpoints import CHATS, COMPLETIONS
from gateway.frontends.openai.http_call import REQUEST_ID, HttpCall

HEADER: Final = "x-diptych-fallback"
PATHS: Final = (CHATS, COMPLETIONS)
_CAUSES: Final = (NoReadyWorker, Overloaded, Draining)
_CONNECT_S: Final = 5.0
_LONGEST_S: Final = 3600.0
_KEPT: Final = (hdrs.CONTENT_TYPE, hdrs.CACHE_CONTROL, REQUEST_ID)
_log = logging.getLogger(__name__)


class Fallback:
    """Other server. One object serves all requests.

    Args:
        url: to which the paths below ``/v1`` are added, such as https://api.example.org/v1.
        key: of that server, "" for none; the client's own is never passed on.
        model: that is asked for there; "": the one that the client named.
        count: called with the status of each answer, 0 where there was none.
    """

    def __init__(self, url: str, key: str, model: str, count: Callable[[int], None]) -> None:
        self._url = url.rstrip("/")
        self._key = key
        self._model = model
        self._count = count
        self._host = urlsplit(url).hostname or ""
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections to the other server."""
        if self._session is not None:
            await self._session.close()

    def takes(self, path: str, call: HttpCall, error: DiptychError) -> bool:
        """Return whether a refused request is passed on."""
        started = call.stream is not None and call.stream.started
        return path in PATHS and isinstance(error, _CAUSES) and not started

    async def answer(
        self, request: web.BaseRequest, call: HttpCall, path: str, data: bytes
    ) -> web.StreamResponse | None:
        """Return the other server's answer, sent to the client; None where it has none.

        Raises CancelledError when the client is gone.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False)
        body = json.loads(data) | ({"model": self._model} if self._model else {})
        headers: dict[str, str] = {hdrs.ACCEPT_ENCODING: "identity"}
        if self._key:
            headers[hdrs.AUTHORIZATION] = f"Bearer {self._key}"
        if call.request_id:
            headers[REQUEST_ID] = call.request_id
        left_s = call.time_left_s(asyncio.get_running_loop().time())
        limits = aiohttp.ClientTimeout(total=left_s or _LONGEST_S, connect=_CONNECT_S)
        url = self._url + path.removeprefix("/v1")
        try:
            async with self._session.post(url, json=body, headers=headers, timeout=limits) as other:
                self._count(other.status)
                if other.status != 200:
                    _log.warning("fallback %s: status %d", self._host, other.status)
                    return None
                return await self._pass_on(request, other)
        except (aiohttp.ClientError, TimeoutError) as failure:
            self._count(0)
            _log.warning("fallback %s: %s", self._host, failure or type(failure).__name__)
            return None

    async def _pass_on(self, request: web.BaseRequest, other: aiohttp.ClientResponse) -> web.StreamResponse:
        """Send the other server's answer as it comes; what breaks off breaks off here, too."""
        kept = {name: other.headers[name] for name in _KEPT if name in other.headers}
        response = web.StreamResponse(headers={**kept, HEADER: self._host, **request.get(cors.HEADERS, {})})
        try:
            await response.prepare(request)
            async for some in other.content.iter_any():
                await response.write(some)
            await response.write_eof()
        except ConnectionError as error:
            raise asyncio.CancelledError("the client is gone") from error
        except (aiohttp.ClientError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError("the other server ended its answer") from None
        return response
