"""Routes of the OpenAI-compatible API.

Body in, checked and parsed; the core runs it; JSON or events out. Faults ahead of the core (path, method,
size, type of the body) are answered here, everything else is a `DiptychError`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from http import HTTPStatus
from typing import Final

from aiohttp import hdrs, web

from diptych.runtime.errors import DiptychError
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.call import Calls
from gateway.frontends.anthropic.errors import with_anthropic_errors
from gateway.frontends.batches.routes import BatchRoutes, is_of_batches, no_batches
from gateway.frontends.openai import cors
from gateway.frontends.openai.adapter_routes import AdapterRoutes
from gateway.frontends.openai.answer import Answer
from gateway.frontends.openai.endpoints import MESSAGES, Endpoints, Read
from gateway.frontends.openai.fallback import Fallback
from gateway.frontends.openai.generation import Generation
from gateway.frontends.openai.http_call import EventStream, HttpCall, send_whole
from gateway.frontends.openai.json_request import json_response, read_json, refuse
from gateway.frontends.openai.openapi import openapi_pages
from gateway.frontends.openai.request_builder import HttpGenerateRequest
from gateway.frontends.openai.tokenizer_calls import COUNT_TOKENS, DETOKENIZE, TOKENIZE, TokenizerCalls
from gateway.request.json_values import parse_body
from gateway.served_models.router import ModelRouter

_MODELS: Final = "/v1/models"

Respond = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class OpenAIRoutes:
    """Handlers of all paths but the operators'. One object serves all requests.

    Args:
        adapters: loads and unloads adapters.
        operators: other paths for operators, by method.
        others: returns the handlers of a path of another protocol by method; empty for one that is none.
        fallback: answers what is refused for lack of workers or room.
        allow_origins: origins whose pages may read the answers (CORS); "*": all. Empty: none is told so.
    """

    def __init__(
        self,
        calls: Calls,
        router: ModelRouter,
        allow_origins: Collection[str] = (),
        adapters: AdapterRoutes | None = None,
        *,
        operators: Mapping[str, Mapping[str, Respond]] | None = None,
        others: Callable[[str], Mapping[str, Respond]] = lambda path: {},
        max_body_bytes: int = limits.MAX_BODY_BYTES,
        fallback: Fallback | None = None,
    ) -> None:
        self._fallback = fallback
        self._others = others
        self._max_body_bytes = max_body_bytes
        self._cors = cors.AllowedOrigins(allow_origins)
        self._calls = calls
        self.generation = Generation(calls, router)
        self.batches: BatchRoutes | None = None
        self._router = router
        self._started = int(time.time())
        tokens = TokenizerCalls(calls, router)
        self.readers = Endpoints(router).by_path
        generating = {path: {"POST": partial(self._generate, read)} for path, read in self.readers.items()}
        self._routes: Mapping[str, Mapping[str, Respond]] = {
            **generating,
            MESSAGES: {"POST": with_anthropic_errors(generating[MESSAGES]["POST"])},
            COUNT_TOKENS: {"POST": with_anthropic_errors(tokens.count)},
            TOKENIZE: {"POST": tokens.tokenize},
            DETOKENIZE: {"POST": tokens.detokenize},
            "/v1/embeddings": {"POST": _no_embeddings},
            _MODELS: {"GET": self._models, "HEAD": self._models},
            **(adapters.routes if adapters is not None else {}),
            **(operators or {}),
            **{path: {"GET": page, "HEAD": page} for path, page in _pages().items()},
        }

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        origin = self._cors.allowed_origin(request)
        if origin:
            request[cors.HEADERS] = cors.response_headers(origin)
        response = await self._route(request, origin)
        if not response.prepared:
            response.headers.update(request.get(cors.HEADERS, {}))
        return response

    async def _route(self, request: web.BaseRequest, origin: str) -> web.StreamResponse:
        path = _route_of(request)
        methods = self._routes.get(path) or self._methods_below(path)
        if not methods:
            return refuse(HTTPStatus.NOT_FOUND, "there is no such path", "unknown_path")
        if origin and request.method == hdrs.METH_OPTIONS:
            return web.Response(
                status=HTTPStatus.NO_CONTENT, headers=cors.preflight_headers(request, (*methods, "OPTIONS"))
            )
        handler = methods.get(request.method)
        if handler is None:
            refused = refuse(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"this path takes {', '.join(methods)} only",
                "method_not_allowed",
            )
            refused.headers["Allow"] = ", ".join(methods)
            return refused
        return await handler(request)

    def _methods_below(self, path: str) -> Mapping[str, Respond]:
        """Return the handlers of a path with a name in it; empty for one that is not known."""
        if path.startswith(f"{_MODELS}/"):
            return {"GET": self._model_card, "HEAD": self._model_card}
        if other := self._others(path):
            return other
        if self.batches is not None:
            return self.batches.methods(path)
        return dict.fromkeys(("GET", "POST", "DELETE"), no_batches) if is_of_batches(path) else {}

    async def _generate(self, read: Read, request: web.BaseRequest) -> web.StreamResponse:
        call = HttpCall(_route_of(request), request, self._calls.clock())
        # A caller that is refused need not send a body.
        data = await read_json(request, self._max_body_bytes) if self._calls.admits(call) else b""
        if isinstance(data, web.Response):
            return data
        try:
            with self._calls.account(call):
                call.start_deadline()
                asked, answer = read(parse_body(data))
                return await self._answer(request, call, asked, answer)
        except DiptychError as error:
            other = await self._elsewhere(request, call, data, error)
            return await call.fail(error) if other is None else other

    async def _elsewhere(
        self, request: web.BaseRequest, call: HttpCall, data: bytes, error: DiptychError
    ) -> web.StreamResponse | None:
        """Return the answer of the fallback to a request that was refused; None: there is none."""
        path = _route_of(request)
        if self._fallback is None or not self._fallback.takes(path, call, error):
            return None
        return await self._fallback.answer(request, call, path, data)

    async def _answer(
        self, request: web.BaseRequest, call: HttpCall, asked: HttpGenerateRequest, answer: Answer
    ) -> web.StreamResponse:
        call.id_of = answer.id_of
        if asked.stream:
            call.stream = EventStream(request, answer)
        try:
            messages = await self.generation.run(call, asked)
        finally:
            if call.stream is not None:
                await call.stream.close()
        if call.stream is not None:
            return await call.stream.end()
        headers = {**call.id_header(answer.id_headers), **answer.version_header}
        return await send_whole(request, await answer.whole(call.request_id, messages), headers)

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        call = HttpCall(_MODELS, request, self._calls.clock())
        try:
            with self._calls.account(call):
                found = (await self._router.list_models(pb.ListModelsRequest(), call)).models
                shown = [self._describe(model, name) for model in found for name in self._listed_names(model)]
                return json_response({"object": "list", "data": shown})
        except DiptychError as error:
            return await call.fail(error)

    async def _model_card(self, request: web.BaseRequest) -> web.StreamResponse:
        call = HttpCall(f"{_MODELS}/{{model}}", request, self._calls.clock())
        name = _route_of(request).removeprefix(f"{_MODELS}/")
        try:
            with self._calls.account(call):
                call.names = {}
                found = await self._router.get_model(pb.GetModelRequest(model=name), call)
                return json_response(self._describe(found.model, name))
        except DiptychError as error:
            return await call.fail(error)

    def _listed_names(self, model: pb.Model) -> tuple[str, ...]:
        """Return the names under which a model is listed: of one with chosen aliases all of them."""
        core = None if model.parent else self._router.models.get(model.name)
        return (model.name,) if core is None else (model.name, *core.model.card.served_aliases)

    def _describe(self, model: pb.Model, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "diptych",
            "parent": model.parent or None,
            "digest": model.digest,
            "max_model_len": model.max_context_length,
            "input_modalities": list(model.capabilities.input_modalities),
            "tool_calls": model.capabilities.tool_calls or None,
            "reasoning": model.capabilities.reasoning or None,
        }


def _route_of(request: web.BaseRequest) -> str:
    """Return the path of a request without the slash that some clients end it with."""
    return request.path.rstrip("/") or "/"


def _pages() -> dict[str, Respond]:
    """Return the handlers of the pages that describe this API. They need no key and name no model."""

    def handler(content_type: str, body: bytes) -> Respond:
        async def respond(_: web.BaseRequest) -> web.StreamResponse:
            charset = "utf-8" if content_type == "text/html" else None
            return web.Response(body=body, content_type=content_type, charset=charset)

        return respond

    return {path: handler(*page) for path, page in openapi_pages().items()}


async def _no_embeddings(request: web.BaseRequest) -> web.StreamResponse:
    return refuse(
        HTTPStatus.BAD_REQUEST,
        "this server generates text; it computes no embeddings",
        "unsupported_feature",
    )
