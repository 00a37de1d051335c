"""One choice of a client's request over all its attempts, as a state machine without I/O and without a clock.

The life of a choice (a request has one, or ``n``, see `gateway.session.request_state`):

1. QUEUED: its request waits in the gateway's own bounded queue, and no worker knows of it.
2. ROUTING: an attempt needs a prefill and a decode worker. The first attempt carries the prompt; a later one
   carries the prompt and every token that was delivered, so that it continues at the next index.
3. PREFILLING: the decode worker was told to expect the attempt, and the prefill worker to compute it.
   The prefill worker may say the first token already, which changes nothing but what the client has.
4. DECODING: the decode worker has said tokens of this attempt. Each goes to the client exactly once: what was
   delivered already is dropped by its index, and a gap is a bug that ends the request.
5. Whatever ends an attempt before its time (a worker that dies, refuses or preempts, a corrupt handoff)
   leads back to ROUTING when `recovery.decide` says so; the client sees nothing of it. If no worker can take
   the next attempt, or none may because it seems to have killed two, the choice stays there for a while.
6. FINISHED, FAILED or ABANDONED: over. Whichever worker has not said its last word is told to cancel.

`handle` takes one event and returns what is to be done, in order. Time comes in as an argument.
"""

from __future__ import annotations

from diptych.runtime.errors import DeadlineExceeded, DiptychError, Internal
from gateway.attempt.types import Cause, FinishReason, Role
from gateway.attempt.worker_events import AttemptFailed, DecodeFinished, PrefillCommitted, TokensArrived
from gateway.session.attempt_history import AttemptHistory
from gateway.session.request_limits import RequestLimits
from gateway.session.retry_policy import (
    GiveUp,
    RetryContext,
    decide,
    no_route,
    nobody_came,
    over_budget,
    poisonous,
    shutting_down,
    suspect,
)
from gateway.session.session_actions import Action, AwaitWorker, Cancel, Emit, Fail, Finish, NeedRoute
from gateway.session.session_events import (
    Admitted,
    Broken,
    CancelAsked,
    ClientGone,
    DeadlinePassed,
    Event,
    Launched,
    NoRoute,
    Restored,
    ShuttingDown,
    StopMatched,
    TimeLimitReached,
    WaitOver,
    WorkerGone,
    WorkerUp,
)
from gateway.session.transitions import ENDS, TRANSITIONS, InvalidTransition, State


class ChoiceState:
    """The state of one choice; see the module's docstring.

    Args:
        tally: shared with the request's other choices.
        now: seconds on a monotonic clock, as in every `handle`.
        choice: its index in the request.
    """

    def __init__(self, tally: RequestLimits, *, now: float, choice: int = 0) -> None:
        self.choice = choice
        self.output_ids: list[int] = []
        self.attempt = 0  # the one it is or was part of
        self.attempts: list[int] = []  # all of them
        self.setbacks = AttemptHistory()
        self.transitions: list[tuple[State, float]] = [(State.QUEUED, now)]
        self.state = State.QUEUED
        self._tally = tally
        self._working: dict[Role, str] = {}  # who has not said the last word on the current attempt
        self._had_by: dict[Role, str] = {}  # who has, or had, the current attempt
        self._early = 0  # tokens of the current attempt that the client has from its prefill worker

    @property
    def over(self) -> bool:
        return self.state in ENDS

    @property
    def working(self) -> dict[Role, str]:
        """The workers that may still be busy with the current attempt."""
        return dict(self._working)

    @property
    def history(self) -> RetryContext:
        """What `gateway.session.retry_policy` goes by."""
        return self.setbacks.history(self._tally, len(self.attempts))

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event. After the end every event is without effect.

        Raises:
            IllegalMove: the event cannot come in this state (`Admitted` or `Launched` out of turn).
        """
        if isinstance(event, TokensArrived):  # nearly every event
            return self._tokens(event, now) if self._runs(event.attempt) else []
        if self.over:
            return []
        match event:
            case Admitted():
                if self.state is not State.QUEUED:
                    raise InvalidTransition("admitted twice")
                return self._need_route(now)
            case Launched(attempt, prefill_id, decode_id):
                return self._launch(attempt, prefill_id, decode_id, now)
            case NoRoute(role):
                return self._no_route(role, now)
            case PrefillCommitted(attempt) if self._runs(attempt):
                self._working.pop(Role.PREFILL, None)
                return []
            case DecodeFinished(attempt, reason) if self._runs(attempt):
                self._working.pop(Role.DECODE, None)
                return self._finish(reason, now)
            case AttemptFailed() if self._runs(event.attempt):
                return self._attempt_failed(self._working.pop(event.role, None), event.cause, now)
            case WorkerGone(worker_id, left):
                return self._worker_gone(worker_id, left, now)
            case WorkerUp(worker_id, returned):
                return self._worker_up(worker_id, returned, now)
            case WaitOver(_, attempt) if attempt == self.attempt:
                return self._wait_over(now)
            case Restored(token_ids, _, reason):
                return self._restore(token_ids, reason, now)
            case _:
                return self._interrupt(event, now)

    def _interrupt(self, event: Event, now: float) -> list[Action]:
        """What ends a choice whatever its workers do. The rest is of an earlier attempt, or of strangers."""
        match event:
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
            case _:
                return []

    def move(self, to: State, now: float) -> None:
        """The one place where the state changes: checks the table and stamps the time."""
        if to not in TRANSITIONS[self.state]:
            raise InvalidTransition(f"{self.state.name} → {to.name}")
        self.state = to
        self.transitions.append((to, now))

    def _runs(self, attempt: int) -> bool:
        """Whether it is the attempt that the workers are on: between two attempts there is none."""
        running = self.state is State.DECODING or self.state is State.PREFILLING
        return running and attempt == self.attempt

    @property
    def wants_route(self) -> bool:
        """Whether it may have an attempt now."""
        return self.state is State.ROUTING and not self.setbacks.suspended

    def _need_route(self, now: float) -> list[Action]:
        self.move(State.ROUTING, now)
        if self.setbacks.suspended:
            return self._await_proof(now)
        return [NeedRoute(self.choice)]

    def _await_proof(self, now: float) -> list[Action]:
        if not self._tally.wait_s:
            return self._fail(Internal(), now)
        return self._await(self._tally.wait_s)

    def _await(self, seconds: float) -> list[Action]:
        """One wait at a time, however often nothing came of it."""
        waits, self.setbacks.waits = self.setbacks.waits, True
        return [] if waits else [AwaitWorker(self.choice, self.attempt, seconds)]

    def _launch(self, attempt: int, prefill_id: str, decode_id: str, now: float) -> list[Action]:
        self.move(State.PREFILLING, now)
        self.attempt = attempt
        self.attempts.append(attempt)
        self.setbacks.waits, self.setbacks.waiting_for = False, None
        self._working = {Role.DECODE: decode_id, Role.PREFILL: prefill_id}
        self._had_by = dict(self._working)
        self._early = 0
        return []

    def _restore(self, token_ids: tuple[int, ...], reason: FinishReason | None, now: float) -> list[Action]:
        if self.state is not State.QUEUED or self.output_ids:
            raise InvalidTransition("what the client has is told at the beginning")
        self.output_ids.extend(token_ids)
        return [] if reason is None else self._finish(reason, now)

    def _tokens(self, event: TokensArrived, now: float) -> list[Action]:
        have = len(self.output_ids)
        if event.position > have:
            return self._fail(Internal(), now)  # a token is missing: what follows would be another text
        skip = have - event.position
        fresh = event.token_ids[skip:] if skip else event.token_ids
        if have + len(fresh) > self._tally.max_tokens:
            return self._fail(Internal(), now)
        if event.early:
            self._early += len(fresh)
        elif self.state is not State.DECODING:
            self.move(State.DECODING, now)
            if fresh or self._early:
                self.setbacks.got_on()
        if not fresh:
            return []
        self.output_ids.extend(fresh)
        self._tally.delivered += len(fresh)
        return [Emit(have, fresh, self.choice, event.scores[skip:])]

    def _worker_gone(self, worker_id: str, left: bool, now: float) -> list[Action]:
        casualties = self._tally.casualties
        if worker_id in self._working.values():
            casualties.gone(worker_id, left=left)
            self._working = {r: w for r, w in self._working.items() if w != worker_id}
            return self._attempt_failed(worker_id, Cause.WORKER_LOST, now)
        if casualties.suspected(worker_id):
            casualties.gone(worker_id, left=left)
        if not self.setbacks.suspended and suspect(self.history):  # whoever has it now is in danger
            return self._suspend(now)
        return []

    def _suspend(self, now: float) -> list[Action]:
        """Take it from its workers until it is clear whether those that it lost are dead."""
        self.setbacks.suspended = True
        if self.state is not State.ROUTING:
            self.setbacks.failed(Cause.WORKER_LOST)
            if (error := self._unpaid(now)) is not None:
                return self._fail(error, now)
            return [*self._cancel_working(), *self._need_route(now)]
        return self._await_proof(now)

    def _unpaid(self, now: float) -> DiptychError | None:
        """A fault makes us compute it again: the error, if the gateway's budget for that is spent."""
        budget = self._tally.budget
        if budget is None or budget.spend(now):
            return None
        return over_budget(self.history, budget.wait_s(now))

    def _worker_up(self, worker_id: str, returned: bool, now: float) -> list[Action]:
        """One that is there again, or a new one in its place: who waits may have an answer now."""
        self._tally.casualties.up(worker_id, returned=returned)
        if not returned:
            self.setbacks.replaced(worker_id)
        if self.setbacks.suspended:
            if poisonous(self.history):
                return self._fail(Internal(), now)
            if suspect(self.history):
                return []
            self.setbacks.suspended = False
            return [NeedRoute(self.choice)]
        return [] if self.setbacks.waiting_for is None else [NeedRoute(self.choice)]

    def _attempt_failed(self, worker_id: str | None, cause: Cause, now: float) -> list[Action]:
        if worker_id is None:
            return []  # it had its last word already
        if cause is Cause.PEER_LOST:  # it speaks of the other one
            worker_id = next((w for w in self._had_by.values() if w != worker_id), worker_id)
            self._tally.casualties.suspect(worker_id)
        elif cause is Cause.COMPUTE_FAILED and self.state is State.PREFILLING:
            # Whoever says it: a decode worker computes no row before it has said a first token.
            worker_id = self._had_by[Role.PREFILL]
        self.setbacks.failed(cause)
        if self._tally.cut_off(len(self.output_ids)):  # only the word that it is complete was lost
            return [*self._cancel_working(), *self._finish(FinishReason.LENGTH, now)]
        verdict = decide(cause, self.history, phase=self.state.value)
        if isinstance(verdict, GiveUp):
            return self._fail(verdict.error, now)
        if verdict.fault and (error := self._unpaid(now)) is not None:
            return self._fail(error, now)
        self.setbacks.follow(verdict, worker_id, self._had_by.values())
        return [*self._cancel_working(), *self._need_route(now)]

    def _no_route(self, role: Role, now: float) -> list[Action]:
        if self.setbacks.forgive(self._had_by.get(role)):
            return [NeedRoute(self.choice)]
        self.setbacks.waiting_for = role
        verdict = no_route(role.value, self.history, self._tally.wait_s)
        if isinstance(verdict, GiveUp):
            return self._fail(verdict.error, now)
        return self._await(verdict.seconds)

    def _wait_over(self, now: float) -> list[Action]:
        if self.setbacks.suspended:
            return self._fail(Internal(), now)
        role = self.setbacks.waiting_for
        return [] if role is None else self._fail(nobody_came(role.value, self.history), now)

    def _finish(self, reason: FinishReason, now: float) -> list[Action]:
        return [*self._end(State.FINISHED, now), Finish(reason, self.choice)]

    def _fail(self, error: DiptychError, now: float) -> list[Action]:
        return [*self._end(State.FAILED, now), Fail(error)]

    def _end(self, state: State, now: float) -> list[Action]:
        self.move(state, now)
        return self._cancel_working()

    def _cancel_working(self) -> list[Action]:
        """Decode first: it stops the tokens, and aborts the grant under the prefill worker."""
        working, self._working = self._working, {}
        return [Cancel(role, worker_id, self.attempt, (self.choice,)) for role, worker_id in working.items()]
