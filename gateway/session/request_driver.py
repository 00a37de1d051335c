"""The driver of one request: feeds its choices, does what they ask for, keeps what the client gets.

Events come from the links (tokens, last words, lost workers), from timers and from the handler; all on the
event loop's thread. What is for the client lies in the choices' outputs and in ``outgoing`` until the handler
takes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from diptych.runtime.errors import Internal
from diptych.worker.v1 import work_pb2
from gateway.attempt.phase_times import PhaseBook, Phases
from gateway.attempt.types import FinishReason
from gateway.attempt.work import Job, build_work
from gateway.attempt.worker_events import DecodeFinished, PrefillCommitted, TokensArrived
from gateway.output.logprobs import PromptLogprobs
from gateway.output.output_stream import OutputStream
from gateway.session.beam_output import BeamOutput
from gateway.session.output_buffer import OutputBuffer
from gateway.session.ports import Recovery, RouteChoice, Workers
from gateway.session.request_state import RequestState
from gateway.session.session_actions import (
    Action,
    Attach,
    AwaitWorker,
    Cancel,
    ChooseRoute,
    Dispatch,
    Emit,
    Fail,
    Finish,
)
from gateway.session.session_events import (
    Broken,
    ClientGone,
    DeadlinePassed,
    Event,
    NoRoute,
    Restored,
    Routed,
    StopMatched,
    TimeLimitReached,
    WaitOver,
    WorkerGone,
)
from gateway.worker_pool.codec import LinkEvent, PromptScored
from gateway.worker_pool.links import LinkDown
from gateway.worker_pool.router import NoWorker, RouteRequest

_log = logging.getLogger(__name__)


class RequestDriver:
    """One request from its arrival to its end.

    Args:
        outputs: turn tokens into pieces, one for each choice.
        workers: where attempts go.
        hold: nothing is sent before the end.
        recovery: what it may cost to make up for lost workers; None = no limit but the request's own.

    ``on_first_token`` is called once, when the first token of any output is there.
    """

    def __init__(
        self,
        job: Job,
        outputs: Sequence[OutputStream],
        workers: Workers,
        *,
        clock: Callable[[], float],
        hold: bool = False,
        recovery: Recovery | None = None,
    ) -> None:
        request = job.request
        self.job = job
        self.outputs = outputs
        recovery = recovery or Recovery()
        self.choices = RequestState(
            request.prompt_ids,
            job.max_tokens,
            len(outputs),
            now=clock(),
            budget=recovery.budget,
            wait_s=recovery.wait_s,
            constrained=request.constraint is not None,
        )
        self.prompt_scores = PromptLogprobs(
            len(request.prompt_ids) if request.prompt_logprobs is not None else 0
        )
        self.outgoing = OutputBuffer(held=hold)
        self.resume_token = ""  # for the first message; "" = none
        self.routes: list[RouteChoice] = []
        self.cached_tokens: int | None = None  # of the first attempt, which is what the client sent
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self._phases = PhaseBook()
        self._scored = request.worker_logprobs is not None
        self._work = work_pb2.Work()
        self._namespaces: dict[str, bytes] = {}  # of the workers that were chosen
        self._workers = workers
        self.clock = clock
        self.on_first_token: Callable[[], None] = lambda: None
        self._events: deque[Event] = deque()
        self._whole = BeamOutput() if request.beam_width else None
        self._early: list[Event] = []  # output that came before the scores of the prompt
        self._feeding = False
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def phases(self) -> Phases:
        """Summed over the attempts at the choice that took longest."""
        sessions = self.choices.sessions
        longest = max(sessions, key=lambda session: session.transitions[-1][1])
        return self._phases.of(longest.choice, longest.attempts)

    @property
    def admission_s(self) -> float:
        """Seconds that the request waited, or has waited, in the gateway's own queue."""
        transitions = self.choices.sessions[0].transitions  # they wait together
        left_at = transitions[1][1] if len(transitions) > 1 else self.clock()
        return left_at - transitions[0][1]

    @property
    def billed(self) -> int:
        """Output tokens of all choices."""
        return sum(output.billed for output in self.outputs)

    @property
    def generated(self) -> int:
        """Those of them that the client did not bring along."""
        return self.billed - len(self.job.request.received)

    def start_timers(self, time_limit_s: float | None) -> None:
        """Arm the call's deadline and the request's own soft limit, which counts from now."""
        loop = asyncio.get_running_loop()
        if self.job.deadline is not None:
            left = max(self.job.deadline - self.clock(), 0.0)
            self._timers.append(loop.call_later(left, self.feed, DeadlinePassed()))
        if time_limit_s is not None:
            self._timers.append(loop.call_later(time_limit_s, self.feed, TimeLimitReached()))

    def restore(self, received: tuple[int, ...]) -> bool:
        """Before anything else: the client has these tokens of the only output. Nothing of them comes again.

        False: the output ends before the last of them.
        """
        output = self.outputs[0]
        if not output.restore(received):
            return False
        full = self.choices.tally.cut_off(len(received))
        reason = FinishReason.STOP if output.stopped else FinishReason.LENGTH if full else None
        self.feed(Restored(received, 0, reason))
        return True

    def feed(self, event: Event) -> None:
        """Apply an event and all that follows from it. An error here ends this request and no other."""
        self._events.append(event)
        self._run()

    def hear(self, news: Sequence[LinkEvent]) -> None:
        """What a worker said at one moment; likewise."""
        if self._whole is not None:
            news = self._whole.complete(news)
        for item in news:
            event = item.event
            if item.phases is not None:
                early = isinstance(event, TokensArrived) and event.early
                self._phases.note(item.attempt, item.choice, item.phases, early=early)
            if isinstance(event, TokensArrived) and self.cached_tokens is None:
                # Of a request that was taken up again the tokens it had delivered are cached as well.
                self.cached_tokens = min(item.cached_tokens, self.job.prompt_tokens)
            if isinstance(event, PromptScored):
                self._prompt_scored(event)
            elif self.prompt_scores.complete:
                self._events.append(event)
            elif isinstance(event, TokensArrived | DecodeFinished):
                self._early.append(event)
            elif isinstance(event, PrefillCommitted) and event.attempt == self.choices.attempts:
                self._events.append(Broken(Internal()))  # they were promised before it
            else:
                self._events.append(event)
        self._run()

    def close(self) -> None:
        """The handler is done, for whatever reason: workers that are still busy with it are told to stop."""
        for timer in self._timers:
            timer.cancel()
        self.feed(ClientGone())

    def _run(self) -> None:
        if self._feeding:
            return
        self._feeding = True
        try:
            self._apply_events()
        except Exception:
            _log.exception("request %s: the gateway failed on it", self.job.request.request_id)
            self._events.clear()
            self._events.append(Broken(Internal()))
            self._apply_events()
        finally:
            self._feeding = False

    def _apply_events(self) -> None:
        """All that waits, and what follows from it; then what the workers are to be told, and so on."""
        choices, events = self.choices, self._events
        while True:
            while events:
                now = self.clock()
                for action in choices.handle(events.popleft(), now):
                    if isinstance(action, Emit):
                        self._emit(action, now)
                    else:
                        self._perform(action)
            left = choices.settle()
            if not left:
                return
            for action in left:
                self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case ChooseRoute():
                self._events.append(self._route(action))
            case Attach(worker_id, attempt):
                namespace = self._namespaces[worker_id]
                self._work = build_work(self.job, attempt, namespace, self.clock(), self.admission_s)
                self._send(worker_id, partial(self._workers.attach, worker_id, self._work))
            case Dispatch(worker_id, decode_id, _):  # of the attempt that was attached just now
                self._send(worker_id, partial(self._workers.dispatch, worker_id, decode_id, self._work))
            case Cancel(role, worker_id, number, choices):
                self._workers.cancel(role, worker_id, self.job.work_id, number, choices)
            case AwaitWorker(choice, number, seconds):
                over = WaitOver(choice, number)
                self._timers.append(asyncio.get_running_loop().call_later(seconds, self.feed, over))
            case Finish(reason, choice):
                self._finish(choice, reason)
            case Fail(error):
                self.outgoing.end(error)

    def _route(self, wanted: ChooseRoute) -> Event:
        start = self.clock()
        affinity = self.job.request.session_id or self.job.work_id
        worst_case = self.job.worst_case_tokens
        request = RouteRequest(affinity, len(wanted.token_ids), worst_case, wanted.avoid)
        placement = self._workers.place(request, self.job, wanted.token_ids)
        if isinstance(placement, NoWorker):
            self.routes.append(RouteChoice(start, self.clock(), None))
            return NoRoute(placement.role, wanted.choices)
        self.routes.append(RouteChoice(start, self.clock(), placement))
        self._namespaces[placement.decode_id] = placement.cache_namespace
        return Routed(placement.prefill_id, placement.decode_id, wanted.choices)

    def _send(self, worker_id: str, send: Callable[[], None]) -> None:
        try:
            send()
        except LinkDown:
            self._events.append(WorkerGone(worker_id, left=True))  # it never had the request

    def _emit(self, new: Emit, now: float) -> None:
        self.last_token_at = now
        if self.first_token_at is None:
            self.first_token_at = now
            self.on_first_token()
        if self._scored and not new.scores:
            self._events.appendleft(Broken(Internal()))  # a worker's bug: ranks and logprobs would be wrong
            return
        output = self.outputs[new.choice]
        if output.push(new.token_ids, new.scores):
            self._events.appendleft(StopMatched(output.billed, new.choice))  # before what came later
        elif output.due:
            self.outgoing.put(new.choice)

    def _finish(self, choice: int, reason: FinishReason) -> None:
        output = self.outputs[choice]
        output.finish()
        if output.stopped:
            # Also when the match was complete only with the last held-back text, or when the word that a stop
            # token was the last one was lost.
            reason = FinishReason.STOP
        self.outgoing.finished[choice] = reason
        self.outgoing.put(choice)
        if len(self.outgoing.finished) == len(self.outputs):
            self.outgoing.end()

    def _prompt_scored(self, event: PromptScored) -> None:
        """A gap is a worker's bug."""
        if not self.prompt_scores.add(event.first, event.scores):
            self._events.append(Broken(Internal()))
        elif self.prompt_scores.complete:
            self._events.extend(self._early)
            self._early.clear()
