"""Paths of the status page: `GET /admin` is the page, without data, and `GET /admin/status` what it shows.

The data needs a key with the scope admin. Where no keys are required, every caller of a public port would be
an operator, so that there it is shown on a loopback address only; the admin port has the same as RPCs.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from aiohttp import web

from diptych.runtime.errors import DiptychError, PermissionDenied
from diptych.runtime.message_json import message_members
from diptych.v1 import admin_pb2 as pb
from gateway.call import Calls
from gateway.frontends.openai.http_call import HttpCall
from gateway.frontends.status.page import PAGE, POLICY

PAGE_PATH: Final = "/admin"
DATA_PATH: Final = "/admin/status"
_NO_STORE: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_KEY_NEEDED: Final = (
    "without API keys the status is shown on a loopback address only: "
    "use the admin port (diptych top), or an --api-keys-file with a key of scope admin"
)
Info = Callable[[pb.GetServerInfoRequest], Awaitable[pb.GetServerInfoResponse]]


class StatusRoutes:
    """Handlers of the two paths.

    Args:
        calls: that require the scope admin.
        info: returns the gateway's description.
        load: returns its load now.
        closed: refuse the data: the port can be reached from elsewhere, and needs no key.
    """

    def __init__(
        self, calls: Calls, info: Info, load: Callable[[], pb.WatchLoadResponse], *, closed: bool
    ) -> None:
        self._calls, self._info, self._load, self._closed = calls, info, load, closed
        self.routes: Mapping[
            str, Mapping[str, Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]]
        ] = {
            PAGE_PATH: {"GET": _page, "HEAD": _page},
            DATA_PATH: {"GET": self._status},
        }

    async def _status(self, request: web.BaseRequest) -> web.StreamResponse:
        call = HttpCall(DATA_PATH, request, self._calls.clock())
        try:
            with self._calls.account(call):
                if self._closed:
                    raise PermissionDenied(_KEY_NEEDED)
                info = await self._info(pb.GetServerInfoRequest())
                load = message_members(self._load(), short_enums=True)
                body = json.dumps({**message_members(info), "load": load})
        except DiptychError as error:
            return await call.fail(error)
        return web.Response(text=body, content_type="application/json", headers=_NO_STORE)


async def _page(_: web.BaseRequest) -> web.StreamResponse:
    headers = {**_NO_STORE, "Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"}
    return web.Response(text=PAGE, content_type="text/html", headers=headers)
