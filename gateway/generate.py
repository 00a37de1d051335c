"""The one core under every door: from a message to its tokens, with everything given back at the end.

Validate → try the grammar → take a place in the queue → converse with the workers → write what comes.
Whatever ends the call, the `finally` closes the conversation, which cancels on both workers, and gives place
and id back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from diptych.runtime.errors import DiptychError, Draining, Interrupted, InvalidParameter, NoReadyWorker
from diptych.runtime.failpoints import reach
from diptych.runtime.metrics import GatewayMetrics
from diptych.runtime.telemetry import Telemetry
from diptych.v1 import inference_pb2 as pb
from gateway.admission.admission import Ticket
from gateway.admission.gate import AdmissionGate
from gateway.attempt.work import Job, TraceParent, work_id
from gateway.call import REJECTIONS, Call
from gateway.model.served_model import ServedModel
from gateway.output.detokenizer import Detokenizer, text_after
from gateway.output.output_stream import OutputStream
from gateway.output.ranking import best
from gateway.output.stop_strings import StopStrings
from gateway.output.utf8_text import Utf8Text
from gateway.request.parsed_request import ParsedRequest
from gateway.request.resume_token import ResumeTokens
from gateway.request.resume_token import resumable as can_resume
from gateway.request_parser import RequestParser
from gateway.request_telemetry import OPERATION_KEY, RequestTelemetry, operation_of
from gateway.responses import Responses, add_account
from gateway.session.live_requests import LiveRequests
from gateway.session.ports import Recovery
from gateway.session.request_driver import RequestDriver
from gateway.session.session_events import Admitted
from gateway.worker_pool.worker_pool import WorkerPool


class Generator:
    """The service's reason to be. One object serves all calls."""

    def __init__(
        self,
        model: ServedModel,
        fleet: WorkerPool,
        live: LiveRequests,
        gate: AdmissionGate,
        reader: RequestParser,
        *,
        recovery: Recovery,
        tokens: ResumeTokens,
        telemetry: Telemetry,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._responses = Responses(model.tokenizer)
        self._fleet = fleet
        self._live = live
        self._gate = gate
        self._reader = reader
        self._recovery = recovery
        self._tokens = tokens
        self._telemetry = telemetry
        self._metrics = metrics
        self._clock = clock
        self._context = model.card.max_context
        self.draining = False

    async def stream(self, request: pb.GenerateRequest, call: Call, *, resumable: bool = False) -> None:
        """One message per piece to ``call.write``, the last one with usage and timings. ``resumable``: the
        first one also says how to go on if the stream breaks, where that is possible.

        Raises:
            DiptychError: what the client did wrong, or what went wrong here; ABORTED once output went out.
            CancelledError: the client left. Workers are told to stop before it comes out.
        """
        await self._run(request, call, one_message=False, resumable=resumable)

    async def whole(self, request: pb.GenerateRequest, call: Call) -> pb.GenerateResponse:
        """The same in one message, which is returned and not written. Raises as `stream`, never ABORTED."""
        return await self._run(request, call, one_message=True)

    async def _run(
        self, message: pb.GenerateRequest, call: Call, *, one_message: bool, resumable: bool = False
    ) -> pb.GenerateResponse:
        report = RequestTelemetry(call, operation_of(message))
        error: str | None = None
        try:
            # Read once: a worker that comes or goes meanwhile must not change what was validated.
            limit = min(self._fleet.roster.token_limit() or self._context, self._context)
            call.charges.require(1, 0, self._clock())  # who may not begin is owed no tokenising
            request = await self._reader.read(message, call, report, limit)
            job = self._job(request, call, limit)
            token = self._token(job) if resumable and can_resume(request) else ""
            with self._metered(job, call, report):
                await self._reader.try_grammar(request, call, report)
                return await self._converse(job, call, report, one_message=one_message, resume_token=token)
        except asyncio.CancelledError:
            error = call.why_cancelled(self._clock()).name
            raise
        except DiptychError as failure:
            error = failure.reason
            raise
        except Exception:
            error = "INTERNAL"
            raise
        finally:
            report.send(self._telemetry, self._metrics, error, self._clock())

    @contextmanager
    def _metered(self, job: Job, call: Call, report: RequestTelemetry) -> Iterator[None]:
        """What the request takes of its key's quotas. Raises `QuotaExceeded`."""
        meter, served = call.charges, True
        meter.begin(job.prompt_tokens, self._clock())
        try:
            yield
        except DiptychError as error:
            served = error.code not in REJECTIONS
            raise
        finally:
            if served:
                meter.end(_generated(report))
            else:
                meter.refused(job.prompt_tokens)

    def _token(self, job: Job) -> str:
        return self._tokens.issue(job.request, job.max_tokens, job.tenant)

    async def _converse(
        self, job: Job, call: Call, report: RequestTelemetry, *, one_message: bool, resume_token: str
    ) -> pb.GenerateResponse:
        request = job.request
        if self.draining:
            raise Draining()
        missing = self._fleet.roster.missing_role()
        if missing is not None:
            raise NoReadyWorker(missing.value)
        self._live.reserve(job.tenant, request.request_id)
        ticket: Ticket | None = None
        conversation: RequestDriver | None = None
        try:
            conversation = self._start(job, chat=report.operation == "chat", one_message=one_message)
            conversation.resume_token = resume_token
            conversation.on_first_token = lambda: self._gate.prefilled(_owed(ticket))
            report.conversation = conversation
            self._live.add(conversation)
            reach("gateway.admitted")
            ticket = self._gate.enter(
                self._fleet.tokens_to_compute(conversation.job),
                max_tokens=job.max_tokens - len(request.received),
                sequences=request.beam_width or request.choices,
                priority=request.priority,
                tenant=job.tenant,
                time_left_s=call.time_left_s(self._clock()),
                on_admitted=partial(conversation.feed, Admitted()),
            )
            report.queued = True
            if self._recovery.budget is not None:
                self._recovery.budget.arrived(request.choices, self._clock())
            conversation.start_timers(request.time_limit_s)
            return await self._answer(conversation, call, one_message=one_message)
        finally:
            if conversation is not None:
                conversation.close()
            if ticket is not None and conversation is not None:
                self._gate.leave(ticket, conversation.billed / len(conversation.outputs))
            self._live.release(job.tenant, request.request_id)

    def _job(self, request: ParsedRequest, call: Call, limit: int) -> Job:
        return Job(
            work_id=work_id(request.request_id),
            request=request,
            max_tokens=request.output_budget(limit),
            stop_token_ids=request.worker_stop_ids(self._model.card.eos_token_ids),
            deadline=call.deadline,
            trace=TraceParent(*call.span.child_headers(OPERATION_KEY)),
            tenant=call.caller.tenant,
        )

    def _start(self, job: Job, *, chat: bool, one_message: bool) -> RequestDriver:
        request = job.request
        before = () if chat else request.prompt_ids
        text = text_after(self._model.tokenizer, before, prompt_shown=request.echo)
        stop_ids = frozenset(job.stop_token_ids)
        outputs = [self._output(request, stop_ids, text.copy()) for _ in range(request.choices)]
        hold = one_message or request.best_of is not None
        conversation = RequestDriver(
            job, outputs, self._fleet, clock=self._clock, hold=hold, recovery=self._recovery
        )
        if request.received and not conversation.restore(request.received):
            raise InvalidParameter("received_token_ids", "goes on after the end of the output")
        return conversation

    def _output(self, request: ParsedRequest, stop_ids: frozenset[int], text: Utf8Text) -> OutputStream:
        parser = self._model.tools.parser(request.tools)
        shown = self._model.tools.shown if parser is not None else frozenset()
        needs_text = request.want_text or request.stop or parser is not None
        detokenizer = Detokenizer(self._model.tokenizer, request.skip_special, shown, text)
        return OutputStream(
            detokenizer if needs_text else None,
            StopStrings(request.stop, request.include_stop) if request.stop else None,
            stop_ids=stop_ids,
            include_stop=request.include_stop,
            min_tokens=request.min_tokens,
            interval=request.stream_interval,
            want_text=request.want_text,
            want_token_ids=request.want_token_ids,
            want_scores=request.logprobs is not None,
            calls=parser,
            one_call=request.tools is not None and request.tools.single,
        )

    async def _answer(
        self, conversation: RequestDriver, call: Call, *, one_message: bool
    ) -> pb.GenerateResponse:
        """Write pieces until the end; returns the last message (written already, unless ``one_message``)."""
        outgoing, first = conversation.outgoing, True
        while True:
            await outgoing.ready()
            if outgoing.error is not None:
                await self._deliver_rest(conversation, call, first=first)
            if outgoing.complete:
                break
            await call.write(await self._responses.message(conversation, outgoing.take(), first=first))
            first = False
        message = await self._last_message(conversation, first=first)
        add_account(message, conversation, call.received_at)
        if not one_message:
            await call.write(message)
        return message

    async def _last_message(self, conversation: RequestDriver, *, first: bool) -> pb.GenerateResponse:
        request = conversation.job.request
        if request.best_of is None:
            return await self._responses.message(conversation, conversation.outgoing.take(), first=first)
        ranked = best([output.logprob for output in conversation.outputs], request.n)
        return await self._responses.best(conversation, ranked)

    async def _deliver_rest(self, conversation: RequestDriver, call: Call, *, first: bool) -> NoReturn:
        """The request failed. What was promised as delivered is delivered, unless nothing goes out at all."""
        outgoing = conversation.outgoing
        if outgoing.error is None:
            raise RuntimeError("the request did not fail")
        if outgoing.held:
            if isinstance(outgoing.error, Interrupted):
                raise outgoing.error.before_output() from outgoing.error  # safe to replay
            raise outgoing.error
        pending = [index for index, output in enumerate(conversation.outputs) if output.pending]
        if pending:
            await call.write(await self._responses.message(conversation, pending, first=first))
        raise outgoing.error


def _owed(ticket: Ticket | None) -> Ticket:
    if ticket is None:
        raise RuntimeError("a token came before the request was in the queue")
    return ticket


def _generated(report: RequestTelemetry) -> int:
    return 0 if report.conversation is None else report.conversation.generated
