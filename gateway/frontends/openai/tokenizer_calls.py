"""Calls over HTTP that generate nothing: vLLM's ``/tokenize`` and ``/detokenize``, Anthropic's count."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from aiohttp import web

from diptych.runtime.errors import DiptychError, InvalidParameter
from diptych.v1 import inference_pb2 as pb
from gateway.call import Calls
from gateway.cooperative_yield import PORTION, Yielder, slices
from gateway.frontends.anthropic.messages_request import read_count
from gateway.frontends.openai.answer import ids_inside, inside, joined
from gateway.frontends.openai.body_model import validate_members
from gateway.frontends.openai.chat_request import put_conversation, put_template_options
from gateway.frontends.openai.http_call import HttpCall, send_whole
from gateway.frontends.openai.json_request import read_json
from gateway.frontends.openai.request_builder import RequestBuilder
from gateway.frontends.openai.tokenizer_bodies import DetokenizeBody, TokenizeBody
from gateway.request.json_values import parse_body
from gateway.served_models.router import ModelRouter

TOKENIZE: Final = "/tokenize"
DETOKENIZE: Final = "/detokenize"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"

_Answer = Callable[[dict[str, object], HttpCall], Awaitable[Sequence[str]]]
"""Answers the members of a body with the pieces of one JSON object."""


class TokenizerCalls:
    """Handlers of the paths that tokenise."""

    def __init__(self, calls: Calls, router: ModelRouter) -> None:
        self._calls = calls
        self._router = router

    async def tokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._respond(TOKENIZE, request, self._tokenized)

    async def detokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._respond(DETOKENIZE, request, self._detokenized)

    async def count(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._respond(COUNT_TOKENS, request, self._counted)

    async def _respond(self, route: str, request: web.BaseRequest, answer: _Answer) -> web.StreamResponse:
        call = HttpCall(route, request, self._calls.clock())
        data = await read_json(request) if self._calls.admits(call) else b""
        if isinstance(data, web.Response):
            return data
        try:
            with self._calls.account(call):
                pieces = await answer(parse_body(data), call)
        except DiptychError as error:
            return await call.fail(error)
        return await send_whole(request, pieces, call.id_header())

    async def _tokenized(self, members: dict[str, object], call: HttpCall) -> Sequence[str]:
        body = validate_members(TokenizeBody, members)
        asked = pb.TokenizeRequest(model=body.model or self._router.default_name())
        asked.return_tokens = bool(body.return_token_strs)
        if body.add_special_tokens is not None:
            asked.add_special_tokens = body.add_special_tokens
        if (body.prompt is None) == (body.messages is None):
            raise InvalidParameter("prompt", "one of prompt and messages is required")
        if body.messages is None:
            asked.text, call.names = body.prompt or "", {}
        else:
            builder = RequestBuilder(pb.GenerateRequest())
            put_conversation(body.messages, body.tools, builder)
            put_template_options(body, builder)
            asked.chat.CopyFrom(builder.request.chat)
            call.names = builder.names
        found = await self._router.tokenize(asked, call)
        turns = Yielder()
        head = {"count": len(found.token_ids), "max_model_len": found.max_context_length}
        pieces = [
            f'{{{inside(head)}, "tokens": [',
            await ids_inside(found.token_ids, turns),
            '], "token_strs": ',
        ]
        if not asked.return_tokens:
            return [*pieces, "null}"]
        strings = []
        for some in slices(found.tokens, PORTION):
            strings.append(inside(list(some)))
            await turns.done(len(some))
        return [*pieces, "[", joined(strings), "]}"]

    async def _detokenized(self, members: dict[str, object], call: HttpCall) -> Sequence[str]:
        body = validate_members(DetokenizeBody, members)
        call.names = {"token_ids": "tokens"}
        name = body.model or self._router.default_name()
        asked = pb.DetokenizeRequest(model=name, token_ids=body.tokens, skip_special_tokens=False)
        found = await self._router.detokenize(asked, call)
        return [json.dumps({"prompt": found.text})]

    async def _counted(self, members: dict[str, object], call: HttpCall) -> Sequence[str]:
        builder = read_count(members)
        call.names = builder.names
        asked = pb.TokenizeRequest(model=builder.request.model, chat=builder.request.chat)
        found = await self._router.tokenize(asked, call)
        return [json.dumps({"input_tokens": len(found.token_ids)})]
