"""Paths of the Open Inference Protocol below ``/v2``: health, models, and inference in one answer.

A model's name may have slashes: the path is read from its end. Errors are ``{"error": "message"}`` with the
statuses of the other HTTP APIs.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from aiohttp import web

from diptych import __version__
from diptych.runtime.errors import DiptychError
from gateway.call import Calls
from gateway.frontends.kserve import answer
from gateway.frontends.kserve.models import PLATFORM, config_of, find_model, metadata_of
from gateway.frontends.kserve.request import read_request, with_client_field
from gateway.frontends.kserve_http.json_form import config_json, infer_json, metadata_json, read_infer
from gateway.frontends.openai.http_call import HttpCall, send_whole
from gateway.frontends.openai.json_request import json_response, read_bytes, read_json
from gateway.served_models.router import ModelRouter

ROOT: Final = "/v2"
JSON_BYTES: Final = "Inference-Header-Content-Length"
_MODELS: Final = f"{ROOT}/models/"
_LARGEST_DIGITS: Final = 12

Respond = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class ModelPath(NamedTuple):
    """Path of a model: its name, its version (empty: any), and what is asked of it (empty: metadata)."""

    name: str
    version: str
    action: str


def read_path(path: str) -> ModelPath | None:
    """Return what a path below ``/v2/models/`` names; None for no such path."""
    parts = path.removeprefix(_MODELS).split("/")
    action = parts.pop() if len(parts) > 1 and parts[-1] in ("ready", "infer", "config") else ""
    version = ""
    if len(parts) > 2 and parts[-2] == "versions":
        version = parts.pop()
        parts.pop()
    name = "/".join(parts)
    return ModelPath(name, version, action) if all(parts) else None


class KServeRoutes:
    """Handlers of the paths. One object serves all requests.

    Args:
        ready: returns whether a request that comes now has workers, of any model.
        max_body_bytes: of an inference request.
    """

    def __init__(
        self, calls: Calls, router: ModelRouter, ready: Callable[[], bool], max_body_bytes: int
    ) -> None:
        self._calls = calls
        self._router = router
        self._ready = ready
        self._max_body_bytes = max_body_bytes

    def methods(self, path: str) -> Mapping[str, Respond]:
        """Return the handlers of a path by method; empty for one that is not known."""
        if path.startswith(_MODELS):
            return {} if (model := read_path(path)) is None else self._of_model(model)
        found = {
            ROOT: self._server,
            f"{ROOT}/health/live": self._live,
            f"{ROOT}/health/ready": self._server_ready,
        }.get(path)
        return {} if found is None else {"GET": found, "HEAD": found}

    def _of_model(self, model: ModelPath) -> Mapping[str, Respond]:
        if model.action == "infer":
            return {"POST": with_kserve_errors(partial(self._infer, model))}
        respond = with_kserve_errors(partial(self._describe, model))
        return {"GET": respond, "HEAD": respond}

    async def _server(self, _: web.BaseRequest) -> web.StreamResponse:
        return json_response(
            {"name": PLATFORM, "version": __version__, "extensions": ["model_configuration"]}
        )

    async def _live(self, _: web.BaseRequest) -> web.StreamResponse:
        return json_response({"live": True})

    async def _server_ready(self, _: web.BaseRequest) -> web.StreamResponse:
        return _readiness({"ready": self._ready()})

    async def _describe(self, model: ModelPath, request: web.BaseRequest) -> web.StreamResponse:
        call = HttpCall(_route(model.action), request, self._calls.clock())
        try:
            with self._calls.account(call):
                core, name = find_model(self._router, model.name, model.version, call.caller)
                if model.action == "ready":
                    return _readiness({"name": name, "ready": self._ready() and not core.why_not_ready()})
                if model.action == "config":
                    return json_response(config_json(config_of(core, name)))
                return json_response(metadata_json(metadata_of(core, name)))
        except DiptychError as error:
            return await call.fail(error)

    async def _infer(self, model: ModelPath, request: web.BaseRequest) -> web.StreamResponse:
        call = HttpCall(_route(model.action), request, self._calls.clock())
        size = _json_bytes(request)
        # A caller that is refused need not send a body.
        read = read_json if size is None else read_bytes
        data = await read(request, self._max_body_bytes) if self._calls.admits(call) else b""
        if isinstance(data, web.Response):
            return data
        names: dict[str, str] = {}
        try:
            with self._calls.account(call):
                call.start_deadline()
                asked = read_request(read_infer(data, size, model.name, model.version), streaming=False)
                names = asked.names
                if asked.timeout_s is not None:
                    deadline = call.received_at + asked.timeout_s
                    call.deadline = deadline if call.deadline is None else min(call.deadline, deadline)
                message = await self._router.collect(asked.request, call)
        except DiptychError as error:
            return await call.fail(with_client_field(error, names))
        response = answer.whole(message, replace(asked, raw=False))
        return await send_whole(request, [json.dumps(infer_json(response))], call.id_header())


def with_kserve_errors(respond: Respond) -> Respond:
    """Return the handler with its errors in the protocol's shape."""

    async def responding(request: web.BaseRequest) -> web.StreamResponse:
        response = await respond(request)
        if response.prepared or not isinstance(response, web.Response):
            return response
        body: Any = json.loads(response.text or "{}")
        if isinstance(body.get("error"), dict):
            response.body = json.dumps({"error": body["error"]["message"]}).encode()
        return response

    return responding


def _route(action: str) -> str:
    return f"{_MODELS}{{model}}/{action}" if action else f"{_MODELS}{{model}}"


def _readiness(body: dict[str, object]) -> web.Response:
    return json_response(body, HTTPStatus.OK if body["ready"] else HTTPStatus.SERVICE_UNAVAILABLE)


def _json_bytes(request: web.BaseRequest) -> int | None:
    """Return the bytes of JSON at the beginning of the body; None where all of it is JSON."""
    value = request.headers.get(JSON_BYTES, "")
    digits = value.isascii() and value.isdecimal() and len(value) <= _LARGEST_DIGITS
    return int(value) if digits else None
