"""One client request over all its attempts, as a state machine without I/O and without a clock.

The life of a request:

1. QUEUED: it waits in the gateway's own bounded queue, and no worker knows of it.
2. ROUTING: an attempt needs a prefill and a decode worker. The first attempt carries the prompt; a later one
   carries the prompt and every token that was delivered, so that it continues at the next index.
3. PREFILLING: the decode worker was told to expect the attempt, and the prefill worker to compute it.
4. DECODING: tokens of this attempt have come. Each goes to the client exactly once: what was delivered
   already is dropped by its index, and a gap is a bug that ends the request.
5. A preemption, a corrupt hand-over, or a worker that refuses leads back to ROUTING when `recovery.decide`
   says so; the client sees nothing of it.
6. FINISHED, FAILED or ABANDONED: over. Whichever worker has not said its last word is told to cancel.

`handle` takes one event and returns what is to be done, in order. Time comes in as an argument.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from gateway.recovery import GiveUp, History, Retry, decide, no_route, shutting_down
from gateway.session_events import (
    Action,
    Admitted,
    Attach,
    Attempt,
    AttemptFailed,
    Broken,
    Cancel,
    CancelAsked,
    Cause,
    ChooseRoute,
    ClientGone,
    DeadlinePassed,
    DecodeFinished,
    Dispatch,
    Emit,
    Event,
    Fail,
    Finish,
    FinishReason,
    NoRoute,
    PrefillCommitted,
    Role,
    Routed,
    ShuttingDown,
    StopMatched,
    TimeLimitReached,
    TokensArrived,
    WorkerGone,
)
from runtime.errors import DeadlineExceeded, DiptychError, Internal


class State(Enum):
    """Where a request is. The values are the phase names that clients see in errors."""

    QUEUED = "admission"
    ROUTING = "routing"
    PREFILLING = "prefill"
    DECODING = "decode"
    FINISHED = "finished"
    FAILED = "failed"
    ABANDONED = "abandoned"


_ENDS = frozenset({State.FINISHED, State.FAILED, State.ABANDONED})
_RUNNING = frozenset({State.PREFILLING, State.DECODING})
LEGAL: dict[State, frozenset[State]] = {
    State.QUEUED: _ENDS | {State.ROUTING},
    State.ROUTING: _ENDS | {State.PREFILLING},
    State.PREFILLING: _ENDS | {State.DECODING, State.ROUTING},
    State.DECODING: _ENDS | {State.ROUTING},
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
    State.ABANDONED: frozenset(),
}


class IllegalMove(Exception):
    """The session was asked to do what its table forbids: a bug in the caller or in the table."""


class Session:
    """The state of one request; see the module's docstring.

    Args:
        prompt_ids: the client's prompt as token ids, at least one.
        max_tokens: most output tokens the workers may produce, at least 1.
        now: seconds on a monotonic clock, as in every `handle`.
    """

    def __init__(self, prompt_ids: tuple[int, ...], max_tokens: int, *, now: float) -> None:
        self.prompt_ids = prompt_ids
        self.output_ids: list[int] = []
        self.attempt = 0
        self.history = History(prompt_tokens=len(prompt_ids), max_tokens=max_tokens)
        self.transitions: list[tuple[State, float]] = [(State.QUEUED, now)]
        self._reserve = False
        self._avoid: frozenset[str] = frozenset()
        self._working: dict[Role, str] = {}  # who has not said the last word on the current attempt

    @property
    def state(self) -> State:
        return self.transitions[-1][0]

    @property
    def over(self) -> bool:
        return self.state in _ENDS

    @property
    def working(self) -> dict[Role, str]:
        """The workers that may still be busy with the current attempt."""
        return dict(self._working)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event. After the end every event is without effect.

        Raises:
            IllegalMove: the event cannot come in this state (`Admitted` or `Routed` out of turn).
        """
        if self.over:
            return []
        match event:
            case Admitted():
                if self.state is not State.QUEUED:
                    raise IllegalMove("admitted twice")
                return self._choose_route(now)
            case Routed(prefill_id, decode_id):
                return self._launch(prefill_id, decode_id, now)
            case NoRoute(role):
                return self._fail(no_route(role.value, self.history), now)
            case TokensArrived() if self._runs(event.attempt):
                return self._tokens(event, now)
            case PrefillCommitted(attempt) if self._runs(attempt):
                self._working.pop(Role.PREFILL, None)
                return []
            case DecodeFinished(attempt, reason) if self._runs(attempt):
                self._working.pop(Role.DECODE, None)
                return self._finish(reason, now)
            case AttemptFailed() if self._runs(event.attempt):
                return self._attempt_failed(self._working.pop(event.role, None), event.cause, now)
            case WorkerGone(worker_id) if worker_id in self._working.values():
                self._working = {r: w for r, w in self._working.items() if w != worker_id}
                return self._attempt_failed(worker_id, Cause.WORKER_LOST, now)
            case StopMatched(output_tokens):
                del self.output_ids[output_tokens:]
                return self._finish(FinishReason.STOP, now)
            case TimeLimitReached():
                return self._finish(FinishReason.TIME_LIMIT, now)
            case DeadlinePassed():
                return self._fail(DeadlineExceeded(self.state.value), now)
            case CancelAsked():
                return self._finish(FinishReason.CANCELLED, now)
            case ShuttingDown():
                return self._fail(shutting_down(self.history), now)
            case Broken(error):
                return self._fail(error, now)
            case ClientGone():
                return self._end(State.ABANDONED, now)
            case _:  # of an earlier attempt, or from a worker that has nothing of this request
                return []

    def move(self, to: State, now: float) -> None:
        """The one place where the state changes: checks the table and stamps the time."""
        if to not in LEGAL[self.state]:
            raise IllegalMove(f"{self.state.name} → {to.name}")
        self.transitions.append((to, now))

    def _runs(self, attempt: int) -> bool:
        """Whether it is the attempt that the workers are on: between two attempts there is none."""
        return attempt == self.attempt and self.state in _RUNNING

    def _choose_route(self, now: float) -> list[Action]:
        self.move(State.ROUTING, now)
        return [ChooseRoute((*self.prompt_ids, *self.output_ids), self._avoid)]

    def _launch(self, prefill_id: str, decode_id: str, now: float) -> list[Action]:
        self.move(State.PREFILLING, now)
        self.attempt += 1
        self._working = {Role.DECODE: decode_id, Role.PREFILL: prefill_id}
        attempt = Attempt(self.attempt, (*self.prompt_ids, *self.output_ids), self._reserve)
        return [Attach(decode_id, attempt), Dispatch(prefill_id, decode_id, attempt)]

    def _tokens(self, event: TokensArrived, now: float) -> list[Action]:
        have = len(self.output_ids)
        if event.index > have:
            return self._fail(Internal(), now)  # a token is missing: what follows would be another text
        fresh = event.token_ids[have - event.index :]
        if have + len(fresh) > self.history.max_tokens:
            return self._fail(Internal(), now)
        if self.state is not State.DECODING:
            self.move(State.DECODING, now)
        if not fresh:
            return []
        self.output_ids.extend(fresh)
        self.history = replace(self.history, delivered=len(self.output_ids))
        return [Emit(have, fresh)]

    def _attempt_failed(self, worker_id: str | None, cause: Cause, now: float) -> list[Action]:
        if worker_id is None:
            return []  # it had its last word already
        self.history = _remember(self.history, cause)
        verdict = decide(cause, self.history, phase=self.state.value)
        if isinstance(verdict, GiveUp):
            return self._fail(verdict.error, now)
        return self._retry(verdict, worker_id, now)

    def _retry(self, verdict: Retry, worker_id: str, now: float) -> list[Action]:
        cancels = self._cancel_working()
        if len(self.output_ids) >= self.history.max_tokens:  # only the word that it is complete was lost
            return [*cancels, *self._finish(FinishReason.LENGTH, now)]
        self._reserve = verdict.reserve_worst_case
        if verdict.avoid_worker:
            self._avoid |= {worker_id}
        return [*cancels, *self._choose_route(now)]

    def _finish(self, reason: FinishReason, now: float) -> list[Action]:
        return [*self._end(State.FINISHED, now), Finish(reason)]

    def _fail(self, error: DiptychError, now: float) -> list[Action]:
        return [*self._end(State.FAILED, now), Fail(error)]

    def _end(self, state: State, now: float) -> list[Action]:
        self.move(state, now)
        return self._cancel_working()

    def _cancel_working(self) -> list[Action]:
        """Decode first: it stops the tokens, and aborts the grant under the prefill worker."""
        working, self._working = self._working, {}
        return [Cancel(role, worker_id, self.attempt) for role, worker_id in working.items()]


def _remember(history: History, cause: Cause) -> History:
    match cause:
        case Cause.PREEMPTED:
            return replace(history, preemptions=history.preemptions + 1)
        case Cause.KV_TRANSFER_FAILED:
            return replace(history, transfer_failures=history.transfer_failures + 1)
        case Cause.DRAINING:
            return replace(history, refusals=history.refusals + 1)
        case _:
            return history
