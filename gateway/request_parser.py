"""Parsing of requests: validation, tokenisation, resumption and the check of the grammar."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from diptych.runtime.errors import DeadlineExceeded
from diptych.v1 import inference_pb2 as pb
from gateway.adapters.adapter import Adapter
from gateway.call import Call
from gateway.images.intake import ImageIntake
from gateway.model.images import PreparedImage
from gateway.model.served_model import ServedModel
from gateway.request.grammar_check import GrammarCheck
from gateway.request.parsed_request import ParsedRequest
from gateway.request.resume_token import ResumeTokens, refuse_several, resumed
from gateway.request.validation import parse_request
from gateway.request_telemetry import RequestTelemetry
from gateway.session.states import State
from gateway.tokenizer_pool import TokenizerPool


class RequestParser:
    """Parser of all requests of a model."""

    def __init__(
        self,
        model: ServedModel,
        tokenizer_pool: TokenizerPool,
        tokens: ResumeTokens,
        clock: Callable[[], float],
        images: ImageIntake,
        grammars: GrammarCheck,
        *,
        lenient_json_schema: bool = False,
    ) -> None:
        self._images = images
        self._model = model
        self._lenient_json_schema = lenient_json_schema
        self._tokenizer_pool = tokenizer_pool
        self._tokens = tokens
        self._clock = clock
        self._grammars = grammars

    async def close(self) -> None:
        """Stop the process that decodes images; no call may be running."""
        await self._images.close()

    async def parse(
        self,
        message: pb.GenerateRequest,
        call: Call,
        record: RequestTelemetry,
        limit: int,
        adapter: Adapter | None = None,
    ) -> ParsedRequest:
        """Parse ``message``. Raises DiptychError with the fields at fault.

        ``limit``: of prompt and output together, in tokens. ``adapter``: what the message names. Times go to
        ``record``.
        """
        started = self._clock()
        async with _deadline(call, started):
            images = await self._images.prepare(message.chat, call.caller.tenant)
            parse = partial(self._parse, message, call, token_limit=limit, adapter=adapter, images=images)
            request = await self._tokenizer_pool.run(message, call.caller.tenant, parse)
        record.tokenized = (started, self._clock())
        record.model = request.model
        call.set_request_id(request.request_id)
        return request

    async def check_grammar(self, request: ParsedRequest, call: Call, record: RequestTelemetry) -> None:
        """Compile the grammar of a constrained request, within the call's deadline.

        Raises what `GrammarCheck.check` raises.
        """
        if request.constraint is None:
            return
        started = self._clock()
        try:
            async with _deadline(call, started):
                await request.constraint.verify(self._grammars, call.caller.tenant)
        finally:
            record.grammar_checked = (started, self._clock())

    def _parse(
        self,
        message: pb.GenerateRequest,
        call: Call,
        *,
        token_limit: int,
        adapter: Adapter | None,
        images: tuple[PreparedImage, ...],
    ) -> ParsedRequest:
        """Parse ``message``; with a resume token, as it was resolved when its stream began."""
        parse = partial(
            parse_request,
            message,
            self._model,
            header_request_id=call.header_request_id,
            adapter=adapter,
            token_limit=token_limit,
            images=images,
            lenient_json_schema=self._lenient_json_schema,
        )
        if not message.resume_token:
            return parse()
        opened = self._tokens.open(message.resume_token)
        request = parse(fresh_seed=lambda: opened.seed)
        refuse_several(request)
        self._tokens.check(opened, request, call.caller.tenant)
        received = tuple(message.received_token_ids)
        return resumed(request, opened, received, self._model.card.vocab_size)


@asynccontextmanager
async def _deadline(call: Call, now: float) -> AsyncIterator[None]:
    """Bound a wait for other requests by the call's deadline. Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout(call.time_left_s(now)):
            yield
    except TimeoutError:
        raise DeadlineExceeded(State.QUEUED.value) from None
