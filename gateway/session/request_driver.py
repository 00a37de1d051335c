"""The driver of one request: applies events to its state, carries out the actions, keeps the output.

Events come from the links (tokens, terminal messages, lost workers), from timers and from the handler; all on
the event loop's thread. Output for the client lies in the choices' output streams and in ``output_buffer``
until the handler takes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from diptych.runtime.errors import DiptychError, Internal, Interrupted, NoReadyWorker
from diptych.worker.v1 import work_pb2
from gateway.attempt.phase_times import PhaseReports, PhaseTimes
from gateway.attempt.types import (
    DecodeFinished,
    FinishReason,
    PrefillCommitted,
    TokensArrived,
)
from gateway.attempt.work import Job, build_work
from gateway.output.logprobs import PromptLogprobs
from gateway.output.output_stream import OutputStream
from gateway.session.events import (
    Action,
    Attach,
    AwaitProof,
    AwaitWorker,
    Cancel,
    ChooseRoute,
    ClientGone,
    DeadlinePassed,
    Dispatch,
    Emit,
    Encode,
    Event,
    Fail,
    Finish,
    OutputRestored,
    RequestFailed,
    RouteAgain,
    StopMatched,
    TimeLimitReached,
    WaitExpired,
    WorkerDown,
)
from gateway.session.output_buffer import BeamOutput, OutputBuffer
from gateway.session.placement import Placements, RouteTrace, Workers
from gateway.session.request_state import RequestState
from gateway.session.retry_policy import RetryLimits
from gateway.worker_pool.codec import PromptLogprobsArrived, WorkerEvent
from gateway.worker_pool.links import LinkDown

PROOF_PAUSE_S = 0.03  # between two looks for a worker that was heard of since another one was lost
_log = logging.getLogger(__name__)


class RequestDriver:
    """The driver of one request, from its arrival to its end.

    Args:
        outputs: streams that turn tokens into pieces, one for each choice.
        workers: where attempts go.
        hold: nothing is sent before the end.
        retry_limits: on recovery from lost workers; None = no limit but the request's own.

    ``on_stall`` is called, before the first token, whenever the request begins to wait for a worker that
    could take it (True) and when one has (False), and with whether encode workers alone could.
    ``on_first_token`` is called once, when the first token of any output is there. ``on_choice_end`` is
    called when the workers have nothing more to do for a choice; `state.over` is true at the last one, and at
    an error of the whole request. ``on_output`` is called for all output, before a client reads it, and
    ``on_token_latency`` with each piece of a choice but its first: seconds since the last, and tokens.
    """

    def __init__(
        self,
        job: Job,
        outputs: Sequence[OutputStream],
        workers: Workers,
        *,
        clock: Callable[[], float],
        hold: bool = False,
        retry_limits: RetryLimits | None = None,
    ) -> None:
        request = job.request
        self.job = job
        self.outputs = outputs
        retry_limits = retry_limits or RetryLimits()
        self.state = RequestState(
            request.prompt_ids,
            job.max_tokens,
            len(outputs),
            now=clock(),
            budget=retry_limits.budget,
            wait_s=retry_limits.wait_s,
            constrained=request.constraint is not None,
        )
        wanted = request.prompt_logprobs is not None
        self.prompt_logprobs = PromptLogprobs(len(request.prompt_ids)) if wanted else None
        self.output_buffer = OutputBuffer(held=hold)
        self.resume_token = ""  # for the first message; "" = none
        self._placements = Placements(job, workers, clock)
        self.cached_tokens: int | None = None  # of the first attempt, which is what the client sent
        self.cached_by_attempt: dict[int, int] = {}  # of all that has delivered a token
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self._phase_reports = PhaseReports()
        self._needs_logprobs = request.worker_logprobs is not None
        self._work = work_pb2.Work()
        self._workers = workers
        self.clock = clock
        self.on_first_token: Callable[[], None] = lambda: None
        self.on_stall: Callable[[bool, bool], None] = lambda stalled, awaits_encoder: None
        self.stall = False, False  # as `on_stall` was told
        self.on_choice_end: Callable[[int], None] = lambda choice: None
        self.on_output: Callable[[Emit], None] | None = None
        self.on_token_latency: Callable[[float, int], None] = lambda seconds, tokens: None
        self._emitted_at = [0.0] * len(outputs)  # the last piece of each choice; 0 before the first
        self._events: deque[Event] = deque()
        self._beam_output = BeamOutput() if request.beam_width else None
        self._early: list[Event] = []  # output that came before the prompt's log-probabilities
        self._applying = False
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def routes(self) -> Sequence[RouteTrace]:
        """Route decisions that looked for workers, in order."""
        return self._placements.traces

    @property
    def phases(self) -> PhaseTimes:
        """Phase times summed over the attempts at the choice that took longest."""
        longest = max(self.state.choices, key=lambda choice: choice.transitions[-1][1])
        return self._phase_reports.total(longest.index, longest.attempts)

    @property
    def drafts(self) -> tuple[int, int]:
        """Tokens that were drafted, and those of them that were right."""
        return self._phase_reports.drafts()

    @property
    def admission_s(self) -> float:
        """Seconds that the request waited, or has waited, in the gateway's own queue."""
        transitions = self.state.choices[0].transitions  # it is the first that starts
        left_at = transitions[1][1] if len(transitions) > 1 else self.clock()
        return left_at - transitions[0][1]

    @property
    def billed(self) -> int:
        """Output tokens of all choices."""
        return sum(output.billed for output in self.outputs)

    @property
    def reasoning_tokens(self) -> int:
        """Output tokens of all choices that are reasoning."""
        return sum(output.reasoning_tokens for output in self.outputs)

    @property
    def generated(self) -> int:
        """Output tokens without those that the client brought along."""
        return self.billed - len(self.job.request.received)

    def start_timers(self, time_limit_s: float | None) -> None:
        """Arm the call's deadline and the request's own soft limit, which counts from now."""
        loop = asyncio.get_running_loop()
        if self.job.deadline is not None:
            left = max(self.job.deadline - self.clock(), 0.0)
            self._timers.append(loop.call_later(left, self.feed, DeadlinePassed()))
        if time_limit_s is not None:
            self._timers.append(loop.call_later(time_limit_s, self.feed, TimeLimitReached()))

    def restore_output(self, received: tuple[int, ...]) -> bool:
        """Restore the only output up to the tokens that the client has, before any other event.

        None of them is sent again. False: the output ends before the last of them.
        """
        output = self.outputs[0]
        if not output.restore(received):
            return False
        full = self.state.limits.ends_by_length(len(received))
        reason = FinishReason.STOP if output.stopped else FinishReason.LENGTH if full else None
        self.feed(OutputRestored(received, 0, reason))
        return True

    def feed(self, event: Event) -> None:
        """Apply an event and all that follows from it. An error here ends this request and no other."""
        self._events.append(event)
        self._run()

    def on_events(self, events: Sequence[WorkerEvent]) -> None:
        """Apply the events of one worker message; otherwise as `feed`."""
        if self._beam_output is not None:
            events = self._beam_output.complete(events)
        for item in events:
            event = item.event
            if item.phases is not None:
                early = isinstance(event, TokensArrived) and event.early
                self._phase_reports.record(item.attempt, item.choice, item.phases, early=early)
            if isinstance(event, TokensArrived) and item.attempt not in self.cached_by_attempt:
                self.cached_by_attempt[item.attempt] = item.cached_tokens
                if self.cached_tokens is None:
                    # Of a request that was resumed the tokens it had delivered are cached as well.
                    self.cached_tokens = min(item.cached_tokens, self.job.prompt_tokens)
            if isinstance(event, PromptLogprobsArrived):
                self._add_prompt_logprobs(event)
            elif self.prompt_logprobs is None or self.prompt_logprobs.complete:
                self._events.append(event)
            elif isinstance(event, TokensArrived | DecodeFinished):
                self._early.append(event)
            elif isinstance(event, PrefillCommitted) and event.attempt == self.state.attempts:
                self._events.append(
                    RequestFailed(Internal("tokens came before the prompt's log-probabilities"))
                )
            else:
                self._events.append(event)
        self._run()

    def close(self) -> None:
        """Abandon the request if it still runs: workers that are busy with it get a cancel."""
        for timer in self._timers:
            timer.cancel()
        self.feed(ClientGone())

    def _run(self) -> None:
        if self._applying:
            return
        self._applying = True
        try:
            self._apply_events()
        except Exception:
            _log.exception("request %s: the gateway failed on it", self.job.request.request_id)
            self._events.clear()
            self._events.append(RequestFailed(Internal("the gateway failed on it")))
            self._apply_events()
        finally:
            self._applying = False

    def _apply_events(self) -> None:
        """Apply all queued events, settle with the workers, and repeat until nothing follows."""
        state, events = self.state, self._events
        while True:
            while events:
                now = self.clock()
                for action in state.handle(events.popleft(), now):
                    if isinstance(action, Emit):
                        self._emit(action, now)
                    else:
                        self._perform(action)
            deferred = state.settle()
            for action in deferred:
                self._perform(action)
            if not events:
                self._note_stall()
            if not (deferred or events):
                return

    def _note_stall(self) -> None:
        if self.first_token_at is None:
            stall = self.state.stalled, self.state.awaits_encoder
            if stall != self.stall:
                self.stall = stall
                self.on_stall(*stall)

    def _perform(self, action: Action) -> None:
        match action:
            case ChooseRoute():
                self._events.append(self._placements.choose(action, self.state))
            case Attach(worker_id, attempt):
                namespace = self._placements.namespaces[worker_id]
                self._work = build_work(self.job, attempt, namespace, self.clock(), self.admission_s)
                self._send(worker_id, partial(self._workers.attach_attempt, worker_id, self._work))
            case Encode(worker_id, _) if (images := self.job.request.images) is not None:
                self._send(worker_id, partial(self._workers.encode_attempt, worker_id, self._work, images))
            case Dispatch(worker_id, decode_id, _, encoder):  # of the attempt that was attached just now
                images = self.job.request.images
                dispatch = self._workers.dispatch_attempt
                self._send(worker_id, partial(dispatch, worker_id, decode_id, self._work, images, encoder))
            case Cancel(role, worker_id, number, choices):
                self._workers.cancel_attempt(role, worker_id, self.job.work_id, number, choices)
            case AwaitWorker(choice, number, seconds):
                expired = WaitExpired(choice, number)
                self._timers.append(asyncio.get_running_loop().call_later(seconds, self.feed, expired))
            case AwaitProof(choices):
                again = RouteAgain(choices)
                self._timers.append(asyncio.get_running_loop().call_later(PROOF_PAUSE_S, self.feed, again))
            case Finish(reason, choice):
                self._finish(choice, reason)
            case Fail(error):
                self._log_failure(error)
                self.on_choice_end(0)
                self.output_buffer.end(error)

    def _log_failure(self, error: DiptychError) -> None:
        """Log what the error's fixed text does not say, under the request's id."""
        if isinstance(error, Internal | Interrupted | NoReadyWorker):
            why = (isinstance(error, Internal) and error.why) or error.message
            workers = ", ".join(self.state.limits.failed_workers.describe()) or "none"
            _log.log(
                logging.ERROR if isinstance(error, Internal) else logging.WARNING,
                "request %s ends with %s after %d attempts: %s; workers that died under it: %s",
                self.job.request.request_id,
                error.reason,
                self.state.attempts,
                why,
                workers,
            )

    def _send(self, worker_id: str, send: Callable[[], None]) -> None:
        try:
            send()
        except LinkDown:
            self._events.append(WorkerDown(worker_id, graceful=True))  # it never had the request

    def _emit(self, new: Emit, now: float) -> None:
        self.last_token_at = now
        if self.first_token_at is None:
            self.first_token_at = now
            self.on_first_token()
        if self._needs_logprobs and not new.logprobs:
            self._events.appendleft(RequestFailed(Internal("log-probabilities are missing")))
            return
        if self.on_output is not None:
            self.on_output(new)
        output = self.outputs[new.choice]
        emitted_at, self._emitted_at[new.choice] = self._emitted_at[new.choice], now
        if emitted_at and self._beam_output is None:  # the tokens of a beam come all at once
            self.on_token_latency(now - emitted_at, len(new.token_ids))
        if output.push(new.token_ids, new.logprobs):
            self._events.appendleft(StopMatched(output.billed, new.choice))  # before what came later
        elif output.due:
            self.output_buffer.put(new.choice)

    def _finish(self, choice: int, reason: FinishReason) -> None:
        output = self.outputs[choice]
        output.finish(cut=reason is not FinishReason.STOP)
        if output.stopped:
            # Also when the match was complete only with the last held-back text, or when the terminal message
            # after a stop token was lost.
            reason = FinishReason.STOP
        self.on_choice_end(choice)
        self.output_buffer.finished[choice] = reason
        self.output_buffer.put(choice)
        if len(self.output_buffer.finished) == len(self.outputs):
            self.output_buffer.end()

    def _add_prompt_logprobs(self, event: PromptLogprobsArrived) -> None:
        """Add log-probabilities of the prompt; a gap between them is a worker's bug."""
        if self.prompt_logprobs is None or not self.prompt_logprobs.add(event.first, event.logprobs):
            self._events.append(RequestFailed(Internal("log-probabilities of the prompt are missing")))
        elif self.prompt_logprobs.complete:
            self._events.extend(self._early)
            self._early.clear()
