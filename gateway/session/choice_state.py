"""The state machine of one choice of a request over all its attempts, without I/O and without a clock.

The life of a choice (a request has one, or ``n``, see `gateway.session.request_state`):

1. QUEUED: it waits in the gateway's own bounded queue, and no worker knows of it.
2. ROUTING: an attempt needs a prefill and a decode worker. The first attempt carries the prompt; a later one
   carries the prompt and every token that was delivered, so that it continues at the next index.
3. PREFILLING: the decode worker has been sent Attach, and the prefill worker Dispatch; an encode worker that
   makes the rows of its images, Encode, and it works until they are delivered. The prefill worker may send
   the first token already; the client gets it, and the state stays. Where few tokens are new, the decode
   worker may have to compute them itself, without a prefill worker; its answer that they are too many leads
   back to ROUTING, and is neither a failure nor an attempt.
4. DECODING: the decode worker has sent tokens of this attempt. Each goes to the client exactly once: what was
   delivered already is dropped by its index, and a gap is a bug that ends the request.
5. Whatever ends an attempt early (a worker that dies, refuses or preempts, a corrupt handoff) leads back to
   ROUTING when `decide` allows it, unseen by the client. If no worker can take the next attempt, or none may
   because the request seems to have killed two, the choice waits there for a limited time.
6. FINISHED, FAILED or ABANDONED: the end. A worker that has not sent its terminal message gets Cancel.

`gateway.session.states` has the table of transitions. `ChoiceState.handle` takes one event and returns the
actions that follow, in order. Time is an argument.
"""

from __future__ import annotations

from diptych.runtime.errors import DeadlineExceeded, DiptychError, Internal
from gateway.attempt.types import (
    AttemptFailed,
    Cause,
    DecodeFinished,
    FinishReason,
    ImagesDelivered,
    PrefillCommitted,
    Role,
    TokensArrived,
)
from gateway.session.attempt_history import AttemptHistory, RequestLimits
from gateway.session.attempt_workers import AttemptWorkers, LostWorker
from gateway.session.events import (
    Action,
    Admitted,
    AwaitWorker,
    Cancel,
    CancelRequested,
    ClientGone,
    DeadlinePassed,
    Emit,
    Event,
    Fail,
    Finish,
    Launched,
    NeedRoute,
    NoRoute,
    OutputRestored,
    RequestFailed,
    RouteAgain,
    ShuttingDown,
    StopMatched,
    TimeLimitReached,
    WaitExpired,
    WorkerDown,
    WorkerUp,
)
from gateway.session.retry_policy import (
    MOMENT_S,
    GiveUp,
    RetryContext,
    decide,
    no_worker_error,
    over_budget_error,
    poison_request,
    quarantine_error,
    quarantined,
    shutting_down_error,
    wait_or_give_up,
)
from gateway.session.states import TERMINAL, InvalidTransition, State, check_transition


class ChoiceState:
    """The state of one choice; see the module's docstring.

    Args:
        limits: shared with the request's other choices.
        now: seconds on a monotonic clock, as in every `handle`.
        index: of the choice in its request.
    """

    def __init__(self, limits: RequestLimits, *, now: float, index: int = 0) -> None:
        self.index = index
        self.output_ids: list[int] = []
        self.attempt = 0  # the current or the latest one
        self.attempts: list[int] = []  # all of them
        self.history = AttemptHistory()
        self.transitions: list[tuple[State, float]] = [(State.QUEUED, now)]
        self.state = State.QUEUED
        self._limits = limits
        self._workers = AttemptWorkers(now=now)
        self._lost_before_commit: dict[int, LostWorker] = {}  # decode workers, by attempt
        self._early = 0  # tokens of the current attempt that came from its prefill worker

    @property
    def over(self) -> bool:
        return self.state in TERMINAL

    @property
    def working(self) -> dict[Role, str]:
        """The workers that may still be busy with the current attempt."""
        return dict(self._workers.busy)

    @property
    def retry_context(self) -> RetryContext:
        """The input of `gateway.session.retry_policy`."""
        # A choice that starts late is a later attempt, too: others of its request may have sent output.
        others = min(self._limits.delivered, 1)
        return self.history.context(self._limits, max(len(self.attempts), others))

    @property
    def wants_route(self) -> bool:
        """True while it may have an attempt."""
        return self.state is State.ROUTING and not self.history.suspended

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event and return the actions that follow. After the end every event is without effect.

        Raises:
            InvalidTransition: the event cannot come in this state (`Admitted` or `Launched` out of turn).
        """
        if isinstance(event, TokensArrived):  # nearly every event
            return self._tokens(event, now) if self._runs(event.attempt) else []
        if self.over:
            return []
        match event:
            case Admitted():
                if self.state is not State.QUEUED:
                    raise InvalidTransition("admitted twice")
                self.history.suspended = quarantined(self.retry_context)  # by deaths under other choices
                return self._need_route(now)
            case Launched():
                return self._launch(event, now)
            case NoRoute(role):
                return self._no_route(role, now)
            case RouteAgain() if self.wants_route:
                return [NeedRoute(self.index)]
            case PrefillCommitted(attempt):
                return self._prefill_committed(attempt, now)
            case ImagesDelivered(attempt) if self._runs(attempt):
                self._workers.end(Role.ENCODE)
                return []
            case DecodeFinished(attempt, reason) if self._runs(attempt):
                self._workers.end(Role.DECODE)
                return self._finish(reason, now)
            case AttemptFailed() if self._runs(event.attempt):
                if (worker_id := self._workers.end(event.role)) is None:
                    return []
                return self._attempt_failed(worker_id, event.cause, now, event.role)
            case WorkerDown(worker_id, graceful):
                return self._worker_down(worker_id, graceful, now)
            case WorkerUp(worker_id, same_process):
                return self._worker_up(worker_id, same_process, now)
            case WaitExpired(_, attempt) if attempt == self.attempt:
                return self._wait_expired(now)
            case OutputRestored(token_ids, _, reason):
                return self._restore(token_ids, reason, now)
            case _:
                return self._interrupt(event, now)

    def _interrupt(self, event: Event, now: float) -> list[Action]:
        """Apply an event that ends a choice in any state; the rest, of earlier attempts, have no effect."""
        match event:
            case StopMatched(output_tokens):
                del self.output_ids[output_tokens:]
                return self._finish(FinishReason.STOP, now)
            case TimeLimitReached():
                return self._finish(FinishReason.TIME_LIMIT, now)
            case DeadlinePassed():
                return self._fail(DeadlineExceeded(self.state.value), now)
            case CancelRequested():
                return self._finish(FinishReason.CANCELLED, now)
            case ShuttingDown():
                return self._fail(shutting_down_error(self.retry_context), now)
            case RequestFailed(error):
                return self._fail(error, now)
            case ClientGone():
                return self._end(State.ABANDONED, now)
            case _:
                return []

    def move(self, to: State, now: float) -> None:
        """Change the state, here and nowhere else: check the table and stamp the time."""
        check_transition(self.state, to)
        self.state = to
        self.transitions.append((to, now))

    def _runs(self, attempt: int) -> bool:
        """Return whether workers run this attempt now: between two attempts there is none."""
        running = self.state is State.DECODING or self.state is State.PREFILLING
        return running and attempt == self.attempt

    def _need_route(self, now: float) -> list[Action]:
        self.move(State.ROUTING, now)
        if self.history.suspended:
            return self._await_confirmation(now)
        return [NeedRoute(self.index)]

    def _await_confirmation(self, now: float) -> list[Action]:
        if not self._limits.wait_s:
            return self._fail(quarantine_error(self.retry_context), now)
        return self._await_worker(self._limits.wait_s)

    def _await_worker(self, seconds: float) -> list[Action]:
        """Begin to wait, unless a wait goes on already."""
        waits, self.history.waits = self.history.waits, True
        return [] if waits else [AwaitWorker(self.index, self.attempt, seconds)]

    def _launch(self, event: Launched, now: float) -> list[Action]:
        self.move(State.PREFILLING, now)
        self.attempt = event.attempt
        self.attempts.append(event.attempt)
        self.history.waits, self.history.waiting_for = False, None
        self.history.remote = False
        self._workers = AttemptWorkers(event, now=now)
        self._early = 0
        return []

    def _restore(self, token_ids: tuple[int, ...], reason: FinishReason | None, now: float) -> list[Action]:
        if self.state is not State.QUEUED or self.output_ids:
            raise InvalidTransition("output is restored at the beginning only")
        self.output_ids.extend(token_ids)
        return [] if reason is None else self._finish(reason, now)

    def _tokens(self, event: TokensArrived, now: float) -> list[Action]:
        have = len(self.output_ids)
        if event.position > have:
            why = f"token {have} is missing before token {event.position}"  # the text would be another one
            return self._fail(Internal(why), now)
        skip = have - event.position
        new = event.token_ids[skip:] if skip else event.token_ids
        if have + len(new) > self._limits.max_tokens:
            return self._fail(Internal("a worker sent more than max_tokens"), now)
        if event.early:
            self._early += len(new)
        elif self.state is not State.DECODING:
            self.move(State.DECODING, now)
            if new or self._early:
                self.history.made_progress()
        if not new:
            return []
        self.output_ids.extend(new)
        self._limits.delivered += len(new)
        return [Emit(have, new, self.index, event.logprobs[skip:])]

    def _worker_down(self, worker_id: str, graceful: bool, now: float) -> list[Action]:
        failed, busy = self._limits.failed_workers, self._workers.busy
        if worker_id in busy.values():
            begun = self._workers.decode_begun(decoding=self.state is State.DECODING)
            lost = self._workers.lose(worker_id, now)
            if worker_id != busy.get(Role.DECODE) or begun:
                failed.worker_down(worker_id, graceful=graceful, at=now, since=lost.since)
            elif not graceful:
                self._lost_before_commit[self.attempt] = lost
                prefill_id = busy[Role.PREFILL]  # which has begun, and may have died with it
                failed.suspect(prefill_id, since=lost.since, at=now, within_s=MOMENT_S)
            return self._attempt_failed(worker_id, Cause.WORKER_LOST, now)
        if failed.is_suspect(worker_id, now):
            failed.worker_down(worker_id, graceful=graceful, at=now)
        return self._suspend_if_quarantined(now)

    def _prefill_committed(self, attempt: int, now: float) -> list[Action]:
        if self._runs(attempt):
            self._workers.end(Role.PREFILL)
            encode_id = self._workers.end(Role.ENCODE)  # it has nothing more to do, and may not know
            return [] if encode_id is None else [Cancel(Role.ENCODE, encode_id, attempt, (self.index,))]
        if (lost := self._lost_before_commit.pop(attempt, None)) is None:
            return []
        # It had begun after all: the message of its peer was late.
        failed = self._limits.failed_workers
        failed.worker_down(lost.worker_id, graceful=False, at=lost.at, since=lost.since)
        return self._suspend_if_quarantined(now)

    def _suspend_if_quarantined(self, now: float) -> list[Action]:
        if self.state is State.QUEUED:  # its admission looks at the deaths until then
            return []
        if not self.history.suspended and quarantined(self.retry_context):  # its workers are in danger
            return self._suspend(now)
        return []

    def _suspend(self, now: float) -> list[Action]:
        """Take it from its workers until the deaths of those that it lost are confirmed or refuted."""
        self.history.suspended = True
        if self.state is not State.ROUTING:
            self.history.record_failure(Cause.WORKER_LOST)
            if (error := self._charge(now)) is not None:
                return self._fail(error, now)
            return [*self._cancel_working(), *self._need_route(now)]
        return self._await_confirmation(now)

    def _charge(self, now: float) -> DiptychError | None:
        """Charge a retry after a fault to the gateway's budget; return the error if it is spent."""
        budget = self._limits.budget
        if budget is None or budget.try_spend(now):
            return None
        return over_budget_error(self.retry_context, budget.wait_s(now))

    def _worker_up(self, worker_id: str, same_process: bool, now: float) -> list[Action]:
        self._limits.failed_workers.worker_up(worker_id, same_process=same_process)
        if not same_process:
            self.history.allow_replacement(worker_id)
        if self.history.suspended:
            if poison_request(self.retry_context):
                return self._fail(quarantine_error(self.retry_context), now)
            if quarantined(self.retry_context):
                return []
            self.history.suspended = False
            return [NeedRoute(self.index)]
        return [] if self.history.waiting_for is None else [NeedRoute(self.index)]

    def _attempt_failed(
        self, reporter: str, cause: Cause, now: float, role: Role | None = None
    ) -> list[Action]:
        if cause is Cause.TOO_MANY_NEW:
            return self._route_remotely(now)
        workers = self._workers
        blame = workers.blame(cause, reporter, role, decoding=self.state is State.DECODING)
        if blame.suspect:
            self._limits.failed_workers.suspect(blame.worker_id, since=workers.launched_at, at=now)
        self.history.record_failure(cause)
        if self._limits.ends_by_length(len(self.output_ids)):  # only the terminal message was lost
            return [*self._cancel_working(), *self._finish(FinishReason.LENGTH, now)]
        verdict = decide(cause, self.retry_context, phase=self.state.value)
        if isinstance(verdict, GiveUp):
            return self._fail(verdict.error, now)
        if verdict.charged and (error := self._charge(now)) is not None:
            return self._fail(error, now)
        self.history.plan_retry(verdict, blame.worker_id, workers.pair.values())
        return [*self._cancel_working(), *self._need_route(now)]

    def _route_remotely(self, now: float) -> list[Action]:
        """Need a pair with a prefill worker, after an attempt that was none: nothing of it was begun."""
        self.attempts.pop()
        self.history.remote = True
        return [*self._cancel_working(), *self._need_route(now)]

    def _no_route(self, role: Role, now: float) -> list[Action]:
        if self.history.clear_soft_avoid(self._workers.pair.get(role)):
            return [NeedRoute(self.index)]
        self.history.waiting_for = role
        verdict = wait_or_give_up(role.value, self.retry_context, self._limits.wait_s)
        if isinstance(verdict, GiveUp):
            return self._fail(verdict.error, now)
        return self._await_worker(verdict.seconds)

    def _wait_expired(self, now: float) -> list[Action]:
        if self.history.suspended:
            return self._fail(quarantine_error(self.retry_context), now)
        self.history.waits = False
        role = self.history.waiting_for
        return [] if role is None else self._fail(no_worker_error(role.value, self.retry_context), now)

    def _finish(self, reason: FinishReason, now: float) -> list[Action]:
        return [*self._end(State.FINISHED, now), Finish(reason, self.index)]

    def _fail(self, error: DiptychError, now: float) -> list[Action]:
        return [*self._end(State.FAILED, now), Fail(error)]

    def _end(self, state: State, now: float) -> list[Action]:
        self.move(state, now)
        return self._cancel_working()

    def _cancel_working(self) -> list[Action]:
        """Cancel at the workers, decode first: it stops the tokens, and aborts the prefill worker's grant."""
        busy, self._workers.busy = self._workers.busy, {}
        return [Cancel(role, worker_id, self.attempt, (self.index,)) for role, worker_id in busy.items()]
