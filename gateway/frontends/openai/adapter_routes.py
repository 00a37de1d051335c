"""vLLM's HTTP calls that load and unload adapters at run time, for operators (docs.vllm.ai, "LoRA Adapters").

    POST /v1/load_lora_adapter     {"lora_name": "legal", "lora_path": "/adapters/legal", "load_inplace":
    false} POST /v1/unload_lora_adapter   {"lora_name": "legal"}

Where several models are served, `base_model_name` says to which one an adapter is applied.

They need a key with the scope admin. Where no keys are required, every caller of a public port would be an
operator, so that there they work on a loopback address only; the admin port has the same as RPCs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

from aiohttp import web

from diptych.runtime.errors import DiptychError, InvalidParameter, PermissionDenied
from gateway.call import Calls
from gateway.frontends.openai.http_call import HttpCall
from gateway.frontends.openai.json_request import read_json
from gateway.request.json_values import parse_body
from gateway.served_models.directory import ModelDirectory

LOAD: Final = "/v1/load_lora_adapter"
UNLOAD: Final = "/v1/unload_lora_adapter"
_NAME, _PATH, _REPLACE, _BASE = "lora_name", "lora_path", "load_inplace", "base_model_name"
_NAMES: Final = {"name": _NAME, "path": _PATH, "model": _BASE}  # what the client calls the service's fields
_KEY_NEEDED: Final = (
    "without API keys adapters are loaded over HTTP on a loopback address only: "
    "use the admin port (diptych lora load), or an --api-keys-file with a key of scope admin"
)


class AdapterRoutes:
    """Handlers of the two paths.

    Args:
        calls: that require the scope admin.
        closed: refuse all of them: the port can be reached from elsewhere, and needs no key.
    """

    def __init__(self, calls: Calls, models: ModelDirectory, *, closed: bool) -> None:
        self._calls = calls
        self._models = models
        self._closed = closed
        self.routes: Mapping[
            str, Mapping[str, Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]]
        ] = {
            LOAD: {"POST": partial(self._answer, LOAD, self._load)},
            UNLOAD: {"POST": partial(self._answer, UNLOAD, self._unload)},
        }

    async def _answer(
        self, path: str, run: Callable[[dict[str, object]], Awaitable[str]], request: web.BaseRequest
    ) -> web.StreamResponse:
        call = HttpCall(path, request, self._calls.clock())
        call.names = _NAMES
        data = await read_json(request) if self._calls.admits(call) else b""
        if isinstance(data, web.Response):
            return data
        try:
            with self._calls.account(call):
                if self._closed:
                    raise PermissionDenied(_KEY_NEEDED)
                members = parse_body(data)
                call.target = str(members.get(_NAME, ""))
                return web.Response(text=await run(members))
        except DiptychError as error:
            return await call.fail(error)

    async def _load(self, members: dict[str, object]) -> str:
        name, path = _text(members, _NAME), _text(members, _PATH)
        replace = members.get(_REPLACE, False)
        if not isinstance(replace, bool):
            raise InvalidParameter(_REPLACE, "must be true or false")
        base = _text(members, _BASE) if _BASE in members else ""
        _refuse_others(members, {_NAME, _PATH, _REPLACE, _BASE})
        await self._models.for_adapter(base).adapter_service.load(name, path, replace=replace)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def _unload(self, members: dict[str, object]) -> str:
        name = _text(members, _NAME)
        _refuse_others(members, {_NAME, "lora_int_id"})  # an id of vLLM's own, which says nothing here
        await self._models.with_adapter(name).adapter_service.unload(name)
        return f"Success: LoRA adapter '{name}' removed successfully."


def _text(members: dict[str, object], member: str) -> str:
    value = members.get(member)
    if not isinstance(value, str) or not value:
        raise InvalidParameter(member, "must be a text that is not empty")
    return value


def _refuse_others(members: dict[str, object], known: set[str]) -> None:
    if unknown := sorted(members.keys() - known):
        raise InvalidParameter(unknown[0][:64], "is no member of this call")
