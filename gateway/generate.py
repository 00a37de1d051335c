"""Life of a generation request, the same for all frontends.

1. **Parse** (`gateway.request_parser`): validate the message and tokenise its prompt, long ones in a thread.
2. **Charge** (`gateway.access.quota`): requests and prompt tokens of the key's quota.
3. **Check the grammar** of a constrained request in a child process.
4. **Queue** (`gateway.admission`): reserve the request id, then wait until the workers have room.
5. **Drive** (`gateway.session`): `RequestDriver` routes the choices to a prefill and a decode worker each,
   retries lost attempts, and feeds their tokens to one `OutputStream` per choice (`gateway.output`).
6. **Write** (`gateway.responses`): one message per piece of output, the last one with usage and timings.
7. **Release**: each choice gives its place back with the workers' terminal message, read or not. Whatever
   ended the call, the `finally` blocks close the driver, which cancels on both workers, give back the other
   places and the id, settle the quota, and emit spans and metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final, NoReturn

from diptych.runtime.errors import (
    REJECTIONS,
    ContextLengthExceeded,
    DeadlineExceeded,
    DiptychError,
    Draining,
    Interrupted,
    InvalidParameter,
    NoReadyWorker,
)
from diptych.runtime.failpoints import reach
from diptych.runtime.gateway_metrics import GatewayMetrics
from diptych.runtime.telemetry import Telemetry
from diptych.v1 import inference_pb2 as pb
from gateway.adapters.registry import AdapterRegistry
from gateway.admission.gate import AdmissionGate
from gateway.admission.ticket import Ticket
from gateway.attempt.work import Job, TraceParent, new_work_id
from gateway.call import Call
from gateway.model.served_model import ServedModel
from gateway.output.detokenizer import Detokenizer, Utf8Text, text_after
from gateway.output.logprobs import best_outputs
from gateway.output.output_stream import OutputStream
from gateway.output.reasoning_text import ReasoningText
from gateway.output.stop_strings import StopStrings
from gateway.request.parsed_request import ParsedRequest
from gateway.request.resume_token import ResumeTokens
from gateway.request.resume_token import resumable as can_resume
from gateway.request_parser import RequestParser
from gateway.request_telemetry import OPERATION_KEY, RequestTelemetry, operation_of
from gateway.responses import Responses, add_usage
from gateway.session.events import Admitted
from gateway.session.live_requests import LiveRequests
from gateway.session.request_driver import RequestDriver
from gateway.session.retry_policy import RetryLimits
from gateway.slow_readers import ALTERNATIVE_BYTES, TOKEN_BYTES, StreamWriter, UnreadOutput, unread_bytes
from gateway.worker_pool.worker_pool import WorkerPool

MESSAGE_BYTES: Final = 256 << 10  # of a message's output, estimated: a slow reader is to take it in time


class Generator:
    """Generator of all requests of a model."""

    def __init__(
        self,
        model: ServedModel,
        digest: str,
        worker_pool: WorkerPool,
        live: LiveRequests,
        gate: AdmissionGate,
        parser: RequestParser,
        unread: UnreadOutput,
        *,
        retry_limits: RetryLimits,
        tokens: ResumeTokens,
        telemetry: Telemetry,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
        adapters: AdapterRegistry,
    ) -> None:
        self._adapters = adapters
        self._model = model
        self._digest = digest
        self._responses = Responses(model.tokenizer, digest)
        self._worker_pool = worker_pool
        self._live = live
        self._gate = gate
        self._parser = parser
        self._unread = unread
        self._retry_limits = retry_limits
        self._tokens = tokens
        self._telemetry = telemetry
        self._metrics = metrics
        self._clock = clock
        self._context = model.card.max_context
        self.draining = False

    async def stream(self, request: pb.GenerateRequest, call: Call, *, resumable: bool = False) -> None:
        """Run ``request``; pass one message per piece to ``call.write``, the last one with usage and timings.

        ``resumable``: the first message has a token to resume a broken stream with, where that is possible.

        Raises:
            DiptychError: a fault of the client or the server; ABORTED once output was written.
            CancelledError: the client disconnected. Workers have been sent a cancellation by then.
        """
        await self._run(request, call, one_message=False, resumable=resumable)

    async def collect(self, request: pb.GenerateRequest, call: Call) -> pb.GenerateResponse:
        """Run ``request``; return its one message, write nothing. Raises as `stream` does, never ABORTED."""
        return await self._run(request, call, one_message=True)

    async def _run(
        self, message: pb.GenerateRequest, call: Call, *, one_message: bool, resumable: bool = False
    ) -> pb.GenerateResponse:
        record = RequestTelemetry(call, operation_of(message), model_digest=self._digest)
        error: str | None = None
        try:
            # Read once: a worker that comes or goes meanwhile must not change what was validated.
            limit = min(self._worker_pool.registry.token_limit() or self._context, self._context)
            await call.quota_usage.prepare(1, 0)
            call.quota_usage.require(1, 0, self._clock())  # before the cost of tokenising
            adapter = self._adapters.choose(message.model, message.lora, call.caller)
            with self._adapters.use(adapter):
                request = await self._parser.parse(message, call, record, limit, adapter)
                job = self._job(request, call, limit)
                token = self._token(job) if resumable and can_resume(request) else ""
                await call.quota_usage.prepare(1, job.prompt_tokens)
                with self._charged(job, call, record):
                    await self._parser.check_grammar(request, call, record)
                    return await self._drive(job, call, record, one_message=one_message, resume_token=token)
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
            record.emit(self._telemetry, self._metrics, error, self._clock())

    @contextmanager
    def _charged(self, job: Job, call: Call, record: RequestTelemetry) -> Iterator[None]:
        """Charge the request to its key's quota; refund it if it was not served. Raises `QuotaExceeded`."""
        usage, served = call.quota_usage, True
        usage.begin(job.prompt_tokens, self._clock())
        try:
            yield
        except DiptychError as error:
            served = error.code not in REJECTIONS
            raise
        finally:
            if served:
                usage.end(_generated(record))
            else:
                usage.refused(job.prompt_tokens)

    def _token(self, job: Job) -> str:
        return self._tokens.issue(job.request, job.max_tokens, job.tenant)

    async def _drive(
        self, job: Job, call: Call, record: RequestTelemetry, *, one_message: bool, resume_token: str
    ) -> pb.GenerateResponse:
        request = job.request
        if self.draining:
            raise Draining()
        job = await self._require_workers(job, call)
        self._live.reserve(job.tenant, request.request_id)
        ticket: Ticket | None = None
        driver: RequestDriver | None = None
        try:
            driver = self._driver(
                job,
                chat=record.operation == "chat",
                one_message=one_message,
                call_pieces=call.wants_call_pieces,
            )
            driver.resume_token = resume_token
            driver.on_first_token = lambda: self._gate.prefilled(_required(ticket))
            driver.on_stall = lambda *stall: self._note_stall(ticket, *stall)
            driver.on_choice_end = lambda choice: self._end_choice(driver, ticket, choice)
            driver.on_token_latency = self._metrics.token_latency.observe
            record.driver = driver
            self._live.add(driver)
            reach("gateway.admitted")
            ticket = self._gate.enter(
                self._worker_pool.placer.tokens_to_compute(driver.job),
                max_tokens=job.max_tokens - len(request.received),
                sequences=request.beam_width or request.choices,
                together=request.beam_width is not None,
                priority=request.priority,
                tenant=job.tenant,
                time_left_s=call.time_left_s(self._clock()),
                on_admitted=partial(_admit, driver, call),
            )
            self._note_stall(ticket, *driver.stall)  # at its admission it had no ticket
            record.queued = True
            if self._retry_limits.budget is not None:
                self._retry_limits.budget.record_arrival(request.choices, self._clock())
            driver.start_timers(request.time_limit_s)
            return await self._answer(driver, call, one_message=one_message)
        finally:
            if driver is not None:
                driver.close()
            if ticket is not None and driver is not None:
                self._gate.leave(ticket, driver.billed / len(driver.outputs))
            self._live.release(job.tenant, request.request_id)

    async def _require_workers(self, job: Job, call: Call) -> Job:
        """Return ``job`` when there are workers, after a short wait for them.

        Its output is bounded by their memory, which was not known before they came.
        Raises `NoReadyWorker`, `DeadlineExceeded`, `Draining`, `ContextLengthExceeded`.
        """
        registry = self._worker_pool.registry
        if registry.missing_role() is None or self._worker_pool.placer.falls_back(job):
            return job
        await self._worker_pool.arrivals.wait(call.time_left_s(self._clock()))
        if self.draining:
            raise Draining()
        if (missing := registry.missing_role()) is not None:
            if call.time_left_s(self._clock()) == 0:
                raise DeadlineExceeded("routing")
            raise NoReadyWorker(missing.value)
        limit = registry.token_limit() or self._context
        if job.worst_case_tokens <= limit:
            return job
        if job.request.max_tokens is not None or limit <= job.prompt_tokens:
            raise ContextLengthExceeded(job.prompt_tokens, job.max_tokens, limit)
        return replace(job, max_tokens=limit - job.prompt_tokens)

    def _note_stall(self, ticket: Ticket | None, stalled: bool, awaits_encoder: bool) -> None:
        if ticket is not None:
            self._gate.set_stalled(ticket, stalled, gives_place=awaits_encoder)

    def _end_choice(self, driver: RequestDriver | None, ticket: Ticket | None, choice: int) -> None:
        """Give back the place of a choice, or with the last one what is left of the request's places."""
        if driver is None or ticket is None:
            return
        if driver.state.over:
            self._gate.leave(ticket, driver.outputs[choice].billed)
        else:
            self._gate.end_choice(ticket, choice, driver.outputs[choice].billed)

    def _job(self, request: ParsedRequest, call: Call, limit: int) -> Job:
        return Job(
            work_id=new_work_id(request.request_id),
            request=request,
            max_tokens=request.output_budget(limit),
            stop_token_ids=request.worker_stop_ids(self._model.card.eos_token_ids),
            deadline=call.deadline,
            trace=TraceParent(*call.span.child_headers(OPERATION_KEY)),
            tenant=call.caller.tenant,
        )

    def _driver(self, job: Job, *, chat: bool, one_message: bool, call_pieces: bool) -> RequestDriver:
        request = job.request
        before = () if chat else request.prompt_ids
        text = text_after(self._model.tokenizer, before, prompt_shown=request.echo)
        stop_ids = frozenset(job.stop_token_ids)
        outputs = [
            self._output(request, stop_ids, text.copy(), call_pieces=call_pieces)
            for _ in range(request.choices)
        ]
        hold = one_message or request.best_of is not None
        driver = RequestDriver(
            job, outputs, self._worker_pool, clock=self._clock, hold=hold, retry_limits=self._retry_limits
        )
        if request.received and not driver.restore_output(request.received):
            raise InvalidParameter("received_token_ids", "goes on after the end of the output")
        return driver

    def _output(
        self, request: ParsedRequest, stop_ids: frozenset[int], text: Utf8Text, *, call_pieces: bool
    ) -> OutputStream:
        parser = None
        if request.tools is not None:
            begun = request.reasoning is None
            parser = self._model.tools.parser(request.tools, begun=begun, pieces=call_pieces)
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
            unfinished=self._model.tools.unfinished(request.tools) if parser is not None else None,
            reasoning=self._reasoning(request),
        )

    def _reasoning(self, request: ParsedRequest) -> ReasoningText | None:
        if request.reasoning is None:
            return None
        constraint = request.constraint
        detokenizer = Detokenizer(self._model.tokenizer, request.skip_special) if request.want_text else None
        splitter = request.reasoning.splitter(constrained=constraint is not None)
        exact = constraint is not None and not constraint.optional
        return ReasoningText(splitter, detokenizer, exact=exact)

    async def _answer(self, driver: RequestDriver, call: Call, *, one_message: bool) -> pb.GenerateResponse:
        """Write pieces until the end; return the last message (written already, unless ``one_message``)."""
        writer = StreamWriter(call, self._unread)
        output_buffer, first = driver.output_buffer, True
        if not output_buffer.held:
            driver.on_output = lambda new: writer.produced(unread_bytes(new.token_ids, new.logprobs))
            output_buffer.on_error = writer.fail
        try:
            while True:
                await output_buffer.ready()
                if output_buffer.error is not None:
                    await self._write_rest_and_raise(driver, writer, first=first)
                choices = _due(driver)
                if output_buffer.complete and not output_buffer.due:
                    break
                message = await self._responses.message(driver, choices, first=first)
                await writer.write(message, sum(map(_waiting_bytes, driver.outputs)))
                first = False
            message = await self._last_message(driver, choices, first=first)
            add_usage(message, driver, call.received_at)
            if not one_message:
                await writer.write(message)
            return message
        finally:
            driver.on_output = output_buffer.on_error = None
            writer.close()

    async def _last_message(
        self, driver: RequestDriver, choices: list[int], *, first: bool
    ) -> pb.GenerateResponse:
        request = driver.job.request
        if request.best_of is None:
            return await self._responses.message(driver, choices, first=first)
        ranked = best_outputs([output.logprob for output in driver.outputs], request.n)
        return await self._responses.best_message(driver, ranked)

    async def _write_rest_and_raise(
        self, driver: RequestDriver, writer: StreamWriter, *, first: bool
    ) -> NoReturn:
        """Write the output that counts as delivered, unless it was held back; raise the request's error."""
        output_buffer = driver.output_buffer
        if output_buffer.error is None:
            raise RuntimeError("the request did not fail")
        if output_buffer.held:
            if isinstance(output_buffer.error, Interrupted):
                raise output_buffer.error.before_output() from output_buffer.error  # safe to replay
            raise output_buffer.error
        pending = [index for index, output in enumerate(driver.outputs) if output.pending]
        if pending:
            await writer.write(await self._responses.message(driver, pending, first=first))
        raise output_buffer.error


def _admit(driver: RequestDriver, call: Call, sequences: tuple[int, ...]) -> None:
    """Start the choices with these indices; a beam search, whose sequences are its beams, as a whole."""
    driver.feed(Admitted(() if driver.job.request.beam_width is not None else sequences))
    call.on_admitted()


def _due(driver: RequestDriver) -> list[int]:
    """Take the choices with output to send: all of them, or as many as one message has room for."""
    if driver.output_buffer.held or len(driver.outputs) == 1:
        return driver.output_buffer.take()
    return driver.output_buffer.take([*map(_waiting_bytes, driver.outputs)], MESSAGE_BYTES)


def _waiting_bytes(output: OutputStream) -> int:
    """Estimate the memory of an output's pieces that are in no message so far."""
    return TOKEN_BYTES * output.pending + ALTERNATIVE_BYTES * output.pending_alternatives


def _required(ticket: Ticket | None) -> Ticket:
    if ticket is None:
        raise RuntimeError("a token came before the request was queued")
    return ticket


def _generated(record: RequestTelemetry) -> int:
    return 0 if record.driver is None else record.driver.generated
