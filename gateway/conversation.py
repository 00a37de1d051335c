"""The driver of one request: feeds its session, does what the session asks for, keeps what the client gets.

Events come from the links (tokens, last words, lost workers), from timers and from the RPC handler; all on
the event loop's thread. What is for the client lies in ``records`` until the handler takes it: pieces of
output, and one last record. The queue is bounded by the request's own max_tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from diptych.worker.v1 import work_pb2
from gateway.links import LinkDown
from gateway.output import Delta, OutputStream
from gateway.phase_times import Phases
from gateway.placement import Placement
from gateway.router import NoWorker, RouteRequest
from gateway.session import Session
from gateway.session_events import (
    Action,
    Attach,
    Broken,
    Cancel,
    ChooseRoute,
    ClientGone,
    DeadlinePassed,
    Dispatch,
    Emit,
    Event,
    Fail,
    Finish,
    FinishReason,
    NoRoute,
    Role,
    Routed,
    StopMatched,
    TimeLimitReached,
    TokensArrived,
    WorkerGone,
)
from gateway.work import Job, build_work
from runtime.errors import DiptychError, Internal

_log = logging.getLogger(__name__)


class Workers(Protocol):
    """The fleet, as a conversation sees it. Sending never blocks; it raises `LinkDown`."""

    def place(self, request: RouteRequest, job: Job, token_ids: tuple[int, ...]) -> Placement | NoWorker: ...
    def attach(self, worker_id: str, work: work_pb2.Work) -> None: ...
    def dispatch(self, worker_id: str, decode_id: str, work: work_pb2.Work) -> None: ...
    def cancel(self, role: Role, worker_id: str, work_id: str, attempt: int) -> None: ...


class Conversation:
    """One request from its arrival to its end.

    Args:
        output: turns tokens into pieces.
        workers: where attempts go.
        on_first_token: called once, when the first token of the output is there.
    """

    def __init__(
        self,
        job: Job,
        output: OutputStream,
        workers: Workers,
        *,
        clock: Callable[[], float],
        on_first_token: Callable[[], None],
    ) -> None:
        self.job = job
        self.output = output
        self.session = Session(job.request.prompt_ids, job.max_tokens, now=clock())
        self.records: asyncio.Queue[Delta | FinishReason | DiptychError] = asyncio.Queue()
        self.placements: list[Placement] = []
        self.cached_tokens: int | None = None  # of the first attempt, which is what the client sent
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self._phases: dict[int, Phases] = {}
        self._work = work_pb2.Work()
        self._workers = workers
        self.clock = clock
        self._on_first_token = on_first_token
        self._events: deque[Event] = deque()
        self._feeding = False
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def phases(self) -> Phases:
        """Summed over the attempts so far."""
        return sum(self._phases.values(), Phases())

    def start_timers(self, time_limit_s: float | None) -> None:
        """Arm the call's deadline and the request's own soft limit, which counts from now."""
        loop = asyncio.get_running_loop()
        if self.job.deadline is not None:
            left = max(self.job.deadline - self.clock(), 0.0)
            self._timers.append(loop.call_later(left, self.feed, DeadlinePassed()))
        if time_limit_s is not None:
            self._timers.append(loop.call_later(time_limit_s, self.feed, TimeLimitReached()))

    def feed(self, event: Event) -> None:
        """Apply an event and all that follows from it. An error here ends this request and no other."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                for action in self.session.handle(self._events.popleft(), self.clock()):
                    self._perform(action)
        except Exception:
            _log.exception("request %s: the gateway failed on it", self.job.request.request_id)
            self._events.clear()
            for action in self.session.handle(Broken(Internal()), self.clock()):
                self._perform(action)
        finally:
            self._feeding = False

    def on_tokens(self, event: TokensArrived, cached_tokens: int) -> None:
        """Tokens from the decode worker; ``cached_tokens`` counts with the first of an attempt."""
        if self.cached_tokens is None and event.attempt == 1:
            self.cached_tokens = cached_tokens
        self.feed(event)

    def on_phases(self, attempt: int, phases: Phases) -> None:
        """Where the time of an attempt went; a later report replaces an earlier one."""
        self._phases[attempt] = phases

    def close(self) -> None:
        """The handler is done, for whatever reason: workers that are still busy with it are told to stop."""
        for timer in self._timers:
            timer.cancel()
        self.feed(ClientGone())

    def _perform(self, action: Action) -> None:
        match action:
            case ChooseRoute(token_ids, avoid):
                self._events.append(self._route(token_ids, avoid))
            case Attach(worker_id, attempt):
                namespace = self.placements[-1].cache_namespace
                self._work = build_work(self.job, attempt, namespace, self.clock())
                self._send(worker_id, partial(self._workers.attach, worker_id, self._work))
            case Dispatch(worker_id, decode_id, _):  # of the attempt that was attached just now
                self._send(worker_id, partial(self._workers.dispatch, worker_id, decode_id, self._work))
            case Cancel(role, worker_id, number):
                self._workers.cancel(role, worker_id, self.job.work_id, number)
            case Emit(_, token_ids):
                self._emit(token_ids)
            case Finish(reason):
                self._finish(reason)
            case Fail(error):
                self.records.put_nowait(error)

    def _route(self, token_ids: tuple[int, ...], avoid: frozenset[str]) -> Routed | NoRoute:
        affinity = self.job.request.session_id or self.job.work_id
        request = RouteRequest(affinity, len(token_ids), self.job.worst_case_tokens, avoid)
        placement = self._workers.place(request, self.job, token_ids)
        if isinstance(placement, NoWorker):
            return NoRoute(placement.role)
        self.placements.append(placement)
        return Routed(placement.prefill_id, placement.decode_id)

    def _send(self, worker_id: str, send: Callable[[], None]) -> None:
        try:
            send()
        except LinkDown:
            self._events.append(WorkerGone(worker_id))

    def _emit(self, token_ids: tuple[int, ...]) -> None:
        self.last_token_at = self.clock()
        if self.first_token_at is None:
            self.first_token_at = self.last_token_at
            self._on_first_token()
        if self.output.push(token_ids):
            self._events.append(StopMatched(self.output.billed))
            return
        delta = self.output.take()
        if delta is not None:
            self.records.put_nowait(delta)

    def _finish(self, reason: FinishReason) -> None:
        delta = self.output.finish()
        match = self.output.stop_match
        if match is not None and match.text is not None:
            reason = FinishReason.STOP  # also when the match was complete only with the last held-back text
        self.records.put_nowait(delta)
        self.records.put_nowait(reason)
