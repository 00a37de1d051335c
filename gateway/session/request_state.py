"""The state machine of one request: all its choices, without I/O and without a clock.

Each choice is a `ChoiceState` of its own. Choices that need an attempt at the same moment and have the same
tokens so far share it: at the start those that are admitted together, with the prompt. What one of them loses
later (by a preemption, for example) it alone computes again. One choice that gives up ends the request; it is
complete when all are.

`RequestState.handle` applies an event. The messages of several choices to the same worker, and the choices
that share an attempt, are known only when all events of the moment are applied: `RequestState.settle` returns
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from diptych.runtime.errors import Internal
from gateway.attempt.types import AttemptFailed, Cause, DecodeFinished, Role, TokensArrived
from gateway.attempt.work import Attempt
from gateway.session.attempt_history import RequestLimits
from gateway.session.choice_state import ChoiceState
from gateway.session.events import (
    Action,
    Admitted,
    Attach,
    AwaitProof,
    Cancel,
    ChooseRoute,
    Dispatch,
    Emit,
    Encode,
    Event,
    Fail,
    Launched,
    NeedRoute,
    NoRoute,
    OutputRestored,
    ProofPending,
    RequestFailed,
    RouteAgain,
    Routed,
    StopMatched,
    WaitExpired,
    WorkerDown,
)
from gateway.session.retry_policy import WORKER_WAIT_S, RetryBudget
from gateway.session.states import State


class RequestState:
    """The state of one request.

    Args:
        prompt_ids: the client's prompt as token ids, at least one.
        max_tokens: most output tokens of one choice, at least 1.
        count: how many choices, at least 1.
        now: seconds on a monotonic clock, as in every `handle`.
        budget, wait_s, constrained: see `gateway.session.attempt_history.RequestLimits`.
    """

    def __init__(
        self,
        prompt_ids: tuple[int, ...],
        max_tokens: int,
        count: int = 1,
        *,
        now: float,
        budget: RetryBudget | None = None,
        wait_s: float = WORKER_WAIT_S,
        constrained: bool = False,
    ) -> None:
        self.limits = RequestLimits(
            len(prompt_ids), max_tokens, budget=budget, wait_s=wait_s, constrained=constrained
        )
        self.choices = tuple(ChoiceState(self.limits, now=now, index=index) for index in range(count))
        self.attempts = 0  # launched so far: the number of the last one
        self.refused = 0  # of these, answered with TOO_MANY_NEW
        self.retries: Counter[Cause] = (
            Counter()
        )  # attempts after the first, by the cause of the failure before
        self.failed_in: State | None = None  # state of the choice that ended the request early
        self._failure: Fail | None = None  # of a choice, not yet spread to the others
        self._prompt_ids = prompt_ids
        self._needing: list[int] = []  # choices that need an attempt
        self._leaving: dict[
            tuple[Role, str, int], list[int]
        ] = {}  # (role, worker, attempt) → choices to cancel

    @property
    def over(self) -> bool:
        return all(choice.over for choice in self.choices)

    @property
    def preemptions(self) -> int:
        return sum(choice.history.failures[Cause.PREEMPTED] for choice in self.choices)

    @property
    def phase(self) -> State:
        """The state of the request; after an early end, its state before."""
        if self.failed_in is not None:
            return self.failed_in
        return next((choice.state for choice in self.choices if not choice.over), State.FINISHED)

    @property
    def stalled(self) -> bool:
        """True while it waits for a worker, and no worker has any of it."""
        live = [choice for choice in self.choices if not choice.over]
        return any(one.history.waits for one in live) and not any(one.working for one in live)

    @property
    def awaits_encoder(self) -> bool:
        """True while all that it waits for is an encode worker, as requests of text do not."""
        live = [choice for choice in self.choices if not choice.over]
        return self.stalled and all(
            one.history.waiting_for is Role.ENCODE for one in live if one.history.waits
        )

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event and return the actions due at once; call `settle` after the last of a moment."""
        match event:
            case TokensArrived():
                return self._apply_to_one(event.choice, event, now)
            case Routed():
                return self._launch(event, now)
            case DecodeFinished() | StopMatched() | OutputRestored() | WaitExpired():
                return self._apply_to_one(event.choice, event, now)
            case AttemptFailed(choice=int(choice)):
                return self._apply_to_one(choice, event, now)
            case ProofPending(choices):
                return [AwaitProof(choices)]
            case Admitted(choices) if choices:
                return self._apply_to_several(choices, event, now)
            case NoRoute() | RouteAgain():
                return self._apply_to_several(event.choices, event, now)
            case WorkerDown(worker_id):
                return self._apply_to_several(self._affected_first(worker_id), event, now)
        return self._apply_to_several(range(len(self.choices)), event, now)

    def settle(self) -> list[Action]:
        """Return the cancels and the route choices that the events of the moment made necessary."""
        if not (self._leaving or self._needing):
            return []
        return [*self._cancels(), *self._routes()]

    def _apply_to_one(self, index: int, event: Event, now: float) -> list[Action]:
        if index >= len(self.choices):  # the request has no such choice
            return self._apply_to_several(
                range(len(self.choices)),
                RequestFailed(Internal("a worker sent a choice that it does not have")),
                now,
            )
        choice = self.choices[index]
        before, actions = choice.state, choice.handle(event, now)
        if len(actions) == 1 and isinstance(actions[0], Emit):
            return actions  # nothing to defer: a token among many
        return [*self._defer(choice, before, actions), *self._spread_failure(now)]

    def _apply_to_several(self, indices: Iterable[int], event: Event, now: float) -> list[Action]:
        """Apply the event to all these choices before the first failure ends them."""
        actions: list[Action] = []
        for index in indices:
            choice = self.choices[index]
            actions += self._defer(choice, choice.state, choice.handle(event, now))
        return [*actions, *self._spread_failure(now)]

    def _affected_first(self, worker_id: str) -> list[int]:
        """Return all choices, those on this worker first: the others are to know of a death by then."""
        affected = {choice.index for choice in self.choices if worker_id in choice.working.values()}
        return sorted(range(len(self.choices)), key=lambda index: index not in affected)

    def _defer(self, choice: ChoiceState, before: State, actions: list[Action]) -> list[Action]:
        """Return the actions that are due at once, and keep the others for `settle`."""
        kept: list[Action] = []
        for action in actions:
            match action:
                case NeedRoute(index):
                    self._needing.append(index)
                case Cancel(role, worker_id, attempt, choices):
                    self._leaving.setdefault((role, worker_id, attempt), []).extend(choices)
                case Fail():
                    self._failure = self._failure or action
                case _:
                    kept.append(action)
        if self.failed_in is None and choice.state in (State.FAILED, State.ABANDONED):
            self.failed_in = before
        return kept

    def _spread_failure(self, now: float) -> list[Action]:
        """End all choices with the first failure of one, which is the error that the client gets."""
        failure, self._failure = self._failure, None
        if failure is None:
            return []
        for choice in self.choices:
            self._defer(choice, choice.state, choice.handle(RequestFailed(failure.error), now))
        self._failure = None  # the others' own
        return [failure]

    def _launch(self, event: Routed, now: float) -> list[Action]:
        """Launch one attempt for all choices that still want it."""
        choices = [self.choices[index] for index in event.choices if self.choices[index].wants_route]
        if not choices:
            return []  # the request ended while its route was chosen
        self.attempts += 1
        if choices[0].history.remote:
            self.refused += 1
        elif (cause := choices[0].history.last_failure) is not None:
            self.retries[cause] += 1
        encoder = event.encoder
        encode_id = None if encoder is None else encoder.worker_id
        launched = Launched(self.attempts, event.prefill_id, event.decode_id, encode_id)
        for choice in choices:
            choice.handle(launched, now)
        attempt = Attempt(
            self.attempts,
            self._tokens_of(choices[0]),
            any(choice.history.reserve for choice in choices),
            tuple(choice.index for choice in choices),
            uncached=any(choice.history.uncached for choice in choices),
            local=event.local,
        )
        attach = Attach(event.decode_id, attempt)
        if event.prefill_id is None:
            return [attach]
        dispatch = Dispatch(event.prefill_id, event.decode_id, attempt, encoder)
        if encoder is None:
            return [attach, dispatch]
        return [attach, Encode(encoder.worker_id, attempt), dispatch]

    def _cancels(self) -> list[Action]:
        """Return one message per worker and attempt; a prefill worker goes on while a choice waits for it."""
        leaving, self._leaving = self._leaving, {}
        staying = {(role, w, choice.attempt) for choice in self.choices for role, w in choice.working.items()}
        actions: list[Action] = []
        for key, indices in leaving.items():
            if key not in staying:
                actions.append(Cancel(*key))
            elif key[0] is Role.DECODE:
                actions.append(Cancel(*key, tuple(sorted(indices))))
        return actions

    def _routes(self) -> list[Action]:
        needing, self._needing = self._needing, []
        groups: dict[tuple[int, ...], list[ChoiceState]] = {}
        for index in needing:
            choice = self.choices[index]
            if choice.wants_route:
                groups.setdefault(tuple(choice.output_ids), []).append(choice)
        return [
            ChooseRoute(
                self._tokens_of(group[0]),
                frozenset().union(*(choice.history.avoid for choice in group)),
                tuple(choice.index for choice in group),
                remote=any(choice.history.remote for choice in group),
            )
            for group in groups.values()
        ]

    def _tokens_of(self, choice: ChoiceState) -> tuple[int, ...]:
        return (*self._prompt_ids, *choice.output_ids)
