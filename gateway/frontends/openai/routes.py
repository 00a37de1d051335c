"""Routes of the OpenAI-compatible API.

Body in, checked and parsed; the core runs it; JSON or events out. Faults ahead of the core (path, method,
size, type of the body) are answered here, everything else is a `DiptychError`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from http import HTTPStatus
from typing import Final

from aiohttp import hdrs, web

from diptych.runtime.errors import REJECTIONS, DiptychError, InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway.access.quota import BatchQuota, QuotaUsage
from gateway.call import Calls
from gateway.frontends.openai import cors
from gateway.frontends.openai.adapter_routes import AdapterRoutes
from gateway.frontends.openai.answer import Answer
from gateway.frontends.openai.chat_answer import ChatAnswer
from gateway.frontends.openai.chat_request import read_chat
from gateway.frontends.openai.completions_answer import CompletionsAnswer
from gateway.frontends.openai.completions_request import read_completions
from gateway.frontends.openai.http_call import EventStream, HttpCall, PromptCall, send_whole
from gateway.frontends.openai.json_request import json_response, read_json, refuse
from gateway.frontends.openai.openapi import openapi_pages
from gateway.frontends.openai.request_builder import HttpGenerateRequest
from gateway.frontends.openai.responses_answer import ResponsesAnswer
from gateway.frontends.openai.responses_request import read_responses
from gateway.generate import Generator
from gateway.model.served_model import ServedModel
from gateway.output.detokenizer import text_after
from gateway.request.field_checks import request_id
from gateway.request.json_values import parse_body
from gateway.tokenizer_service import TokenizerService

_MODELS: Final = "/v1/models"

Respond = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


_Read = Callable[[dict[str, object]], tuple[HttpGenerateRequest, Answer]]
"""Reads the body of a kind of generation, and makes the answer to it."""


class OpenAIRoutes:
    """Handlers of all paths but the operators'. One object serves all requests.

    Args:
        digest: of the model, for ``system_fingerprint``.
        adapters: loads and unloads adapters.
        allow_origins: origins whose pages may read the answers (CORS); "*": all. Empty: none is told so.
    """

    def __init__(
        self,
        calls: Calls,
        generator: Generator,
        text: TokenizerService,
        model: ServedModel,
        digest: str,
        allow_origins: Collection[str] = (),
        adapters: AdapterRoutes | None = None,
    ) -> None:
        self._cors = cors.AllowedOrigins(allow_origins)
        self._calls = calls
        self._generator = generator
        self._text = text
        self._model = model
        self._fingerprint = f"fp_{digest[:12]}"
        self._started = int(time.time())
        self._routes: Mapping[str, Mapping[str, Respond]] = {
            "/v1/completions": {"POST": partial(self._generate, self._read_completions)},
            "/v1/chat/completions": {"POST": partial(self._generate, self._read_chat)},
            "/v1/responses": {"POST": partial(self._generate, self._read_responses)},
            "/v1/embeddings": {"POST": _no_embeddings},
            _MODELS: {"GET": self._models, "HEAD": self._models},
            **(adapters.routes if adapters is not None else {}),
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
        if path.startswith(f"{_MODELS}/"):
            methods: Mapping[str, Respond] = {"GET": self._model_card, "HEAD": self._model_card}
        else:
            methods = self._routes.get(path, {})
        if not methods:
            return refuse(HTTPStatus.NOT_FOUND, "there is no such path", "unknown_path")
        if origin and request.method == hdrs.METH_OPTIONS:
            return web.Response(
                status=HTTPStatus.NO_CONTENT, headers=cors.preflight_headers(request, (*methods, "OPTIONS"))
            )
        handler = methods.get(request.method)
        if handler is None:
            refused = refuse(
                HTTPStatus.METHOD_NOT_ALLOWED, f"only {', '.join(methods)}", "method_not_allowed"
            )
            refused.headers["Allow"] = ", ".join(methods)
            return refused
        return await handler(request)

    async def _generate(self, read: _Read, request: web.BaseRequest) -> web.StreamResponse:
        call = HttpCall(_route_of(request), request, self._calls.clock())
        # A caller that is refused need not send a body.
        data = await read_json(request) if self._calls.admits(call) else b""
        if isinstance(data, web.Response):
            return data
        try:
            with self._calls.account(call):
                call.start_deadline()
                asked, answer = read(parse_body(data))
                return await self._answer(request, call, asked, answer)
        except DiptychError as error:
            return await call.fail(error)

    async def _answer(
        self, request: web.BaseRequest, call: HttpCall, asked: HttpGenerateRequest, answer: Answer
    ) -> web.StreamResponse:
        call.id_of = answer.id_of
        if asked.stream:
            call.stream = EventStream(request, answer)
        try:
            messages = await (
                self._one(call, asked) if len(asked.builders) == 1 else self._several(call, asked)
            )
        finally:
            if call.stream is not None:
                await call.stream.close()
        if call.stream is not None:
            return await call.stream.end()
        return await send_whole(request, await answer.whole(call.request_id, messages), call.id_header())

    async def _one(self, call: HttpCall, asked: HttpGenerateRequest) -> list[pb.GenerateResponse]:
        """Generate one answer and return it; nothing is returned for a stream, as in `_several`."""
        builder = asked.builders[0]
        call.names = builder.names
        if asked.stream:
            await self._generator.stream(builder.request, call)
            return []
        return [await self._generator.collect(builder.request, call)]

    async def _several(self, call: HttpCall, asked: HttpGenerateRequest) -> list[pb.GenerateResponse]:
        """Generate for all prompts at once; the first that fails ends the others."""
        meter = self._meter(call.caller.quota_usage, len(asked.builders))
        served = True
        try:
            return await self._parts(call, asked, meter)
        except DiptychError as error:
            served = error.code not in REJECTIONS or (call.stream is not None and call.stream.started)
            raise
        finally:
            meter.close(served=served)

    async def _parts(
        self, call: HttpCall, asked: HttpGenerateRequest, meter: BatchQuota
    ) -> list[pb.GenerateResponse]:
        call.set_request_id(request_id("", call.header_request_id, lambda: secrets.token_hex(16)))

        async def one(prompt: int) -> pb.GenerateResponse | None:
            builder = asked.builders[prompt]
            part = PromptCall(call, prompt, meter, self._calls.clock())
            try:
                with self._calls.account(part):
                    if asked.stream:
                        await self._generator.stream(builder.request, part)
                        return None
                    return await self._generator.collect(builder.request, part)
            except DiptychError:
                call.names = builder.names
                raise

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(prompt)) for prompt in range(len(asked.builders))]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [message for task in tasks if (message := task.result()) is not None]

    def _meter(self, meter: QuotaUsage, prompts: int) -> BatchQuota:
        """Reserve the quota before the first of them costs anything.

        Raises InvalidParameter or QuotaExceeded.
        """
        most = meter.quota.most_together
        if most is not None and prompts > most:
            why = "each is a request, and this API key may begin no more at once"
            raise InvalidParameter("prompt", f"must be at most {most} prompts: {why}")
        return BatchQuota(meter, prompts, self._calls.clock())

    def _read_completions(self, members: dict[str, object]) -> tuple[HttpGenerateRequest, Answer]:
        asked = read_completions(members)
        return asked, CompletionsAnswer(
            asked,
            model=self._shown_name(asked),
            fingerprint=self._fingerprint,
            created=int(time.time()),
            decode=lambda ids: self._model.tokenizer.decode(ids, False),
            text_after=partial(text_after, self._model.tokenizer, prompt_shown=asked.echo),
            special=self._model.tokenizer.is_special,
        )

    def _read_chat(self, members: dict[str, object]) -> tuple[HttpGenerateRequest, Answer]:
        asked = read_chat(members)
        return asked, ChatAnswer(
            asked,
            model=self._shown_name(asked),
            fingerprint=self._fingerprint,
            created=int(time.time()),
        )

    def _read_responses(self, members: dict[str, object]) -> tuple[HttpGenerateRequest, Answer]:
        asked, body = read_responses(members)
        return asked, ResponsesAnswer(asked, body, model=self._shown_name(asked), created=int(time.time()))

    def _shown_name(self, asked: HttpGenerateRequest) -> str:
        """Return the name in the answer: an adapter's as it was asked for; any other is refused later."""
        name, card = asked.builders[0].request.model, self._model.card
        return card.shown_name(name) if card.answers_to(name) else name

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        call = HttpCall(_MODELS, request, self._calls.clock())
        try:
            with self._calls.account(call):
                base, *adapters = (await self._text.list_models(pb.ListModelsRequest(), call)).models
                names = (base.name, *self._model.card.served_aliases)
                shown = [self._describe(base, name) for name in names]
                shown += [self._describe(model, model.name) for model in adapters]
                return json_response({"object": "list", "data": shown})
        except DiptychError as error:
            return await call.fail(error)

    async def _model_card(self, request: web.BaseRequest) -> web.StreamResponse:
        call = HttpCall(f"{_MODELS}/{{model}}", request, self._calls.clock())
        name = _route_of(request).removeprefix(f"{_MODELS}/")
        try:
            with self._calls.account(call):
                call.names = {}
                found = await self._text.get_model(pb.GetModelRequest(model=name), call)
                return json_response(self._describe(found.model, name))
        except DiptychError as error:
            return await call.fail(error)

    def _describe(self, model: pb.Model, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "diptych",
            "parent": model.parent or None,
            "max_model_len": model.max_context_length,
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
