"""Parser of requests: a message is validated and tokenised, and its grammar compiled on trial."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from diptych.runtime.errors import DeadlineExceeded
from diptych.v1 import inference_pb2 as pb
from gateway.call import Call
from gateway.model.served_model import ServedModel
from gateway.request.grammar_check import GrammarCheck
from gateway.request.parsed_request import ParsedRequest
from gateway.request.resume_token import ResumeTokens, refuse_several, resumed
from gateway.request.validation import parse_request
from gateway.request_telemetry import RequestTelemetry
from gateway.session.transitions import State
from gateway.tokenizer_pool import TokenizerPool


class RequestParser:
    """Parser of all requests of a gateway."""

    def __init__(
        self, model: ServedModel, texts: TokenizerPool, tokens: ResumeTokens, clock: Callable[[], float]
    ) -> None:
        self._model = model
        self._texts = texts
        self._tokens = tokens
        self._clock = clock
        self._grammars = GrammarCheck()

    async def close(self) -> None:
        """End the grammar check, once no call is running."""
        await self._grammars.close()

    async def read(
        self, message: pb.GenerateRequest, call: Call, report: RequestTelemetry, limit: int
    ) -> ParsedRequest:
        """`limit`: prompt and output together, in tokens. Raises DiptychError with the fields at fault."""
        started = self._clock()
        parse = partial(self._parse, message, call, token_limit=limit)
        async with _in_time(call, started):
            request = await self._texts.read(message, call.caller.tenant, parse)
        report.tokenized = (started, self._clock())
        report.model = request.model
        call.name(request.request_id)
        return request

    async def try_grammar(self, request: ParsedRequest, call: Call, report: RequestTelemetry) -> None:
        """Compile the grammar of a constrained request on trial, within the call's deadline.

        Raises what `GrammarCheck.check` raises.
        """
        if request.constraint is None:
            return
        started = self._clock()
        try:
            async with _in_time(call, started):
                await request.constraint.verify(self._grammars, call.caller.tenant)
        finally:
            report.grammar_checked = (started, self._clock())

    def _parse(self, message: pb.GenerateRequest, call: Call, *, token_limit: int) -> ParsedRequest:
        """Validate the message; one with a resume token as it was resolved when its stream began."""
        parse = partial(
            parse_request,
            message,
            self._model,
            header_request_id=call.header_request_id,
            token_limit=token_limit,
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
async def _in_time(call: Call, now: float) -> AsyncIterator[None]:
    """Bound a wait by the call's deadline. Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout(call.time_left_s(now)):
            yield
    except TimeoutError:
        raise DeadlineExceeded(State.QUEUED.value) from None
