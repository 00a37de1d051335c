"""All choices of one request, as a state machine without I/O and without a clock.

Each choice is a `ChoiceState` of its own. Choices that need an attempt at the same moment and have the same
tokens so far share it: at the start that is all of them, with the prompt. What one of them loses later (by a
preemption, say) it alone computes again. One choice that gives up ends the request; it is complete when all
are.

`handle` applies an event. What several choices have to say to the same worker, and who shares an attempt, is
known only when all events of the moment were applied: `settle` says it then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from diptych.runtime.errors import Internal
from gateway.attempt.types import Cause, Role
from gateway.attempt.work import Attempt
from gateway.attempt.worker_events import AttemptFailed, DecodeFinished, TokensArrived
from gateway.session.choice_state import ChoiceState
from gateway.session.request_limits import RequestLimits
from gateway.session.retry_budget import RetryBudget
from gateway.session.retry_policy import WAIT_FOR_WORKER_S
from gateway.session.session_actions import (
    Action,
    Attach,
    Cancel,
    ChooseRoute,
    Dispatch,
    Emit,
    Fail,
    NeedRoute,
)
from gateway.session.session_events import (
    Broken,
    Event,
    Launched,
    NoRoute,
    Restored,
    Routed,
    StopMatched,
    WaitOver,
    WorkerGone,
)
from gateway.session.transitions import State


class RequestState:
    """The state of one request.

    Args:
        prompt_ids: the client's prompt as token ids, at least one.
        max_tokens: most output tokens of one choice, at least 1.
        count: how many choices, at least 1.
        now: seconds on a monotonic clock, as in every `handle`.
        budget, wait_s, constrained: see `gateway.session.request_limits.RequestLimits`.
    """

    def __init__(
        self,
        prompt_ids: tuple[int, ...],
        max_tokens: int,
        count: int = 1,
        *,
        now: float,
        budget: RetryBudget | None = None,
        wait_s: float = WAIT_FOR_WORKER_S,
        constrained: bool = False,
    ) -> None:
        self.tally = RequestLimits(
            len(prompt_ids), max_tokens, budget=budget, wait_s=wait_s, constrained=constrained
        )
        self.sessions = tuple(ChoiceState(self.tally, now=now, choice=index) for index in range(count))
        self.attempts = 0  # launched so far
        self.retries: Counter[Cause] = Counter()  # of these, why all after the first
        self.failed_in: State | None = None  # where the choice was that ended the request before its time
        self._failure: Fail | None = None  # of a choice, not yet told to the others
        self._prompt_ids = prompt_ids
        self._needing: list[int] = []  # choices that need an attempt
        self._leaving: dict[tuple[Role, str, int], list[int]] = {}  # (role, worker, attempt) → who leaves it

    @property
    def over(self) -> bool:
        return all(session.over for session in self.sessions)

    @property
    def preemptions(self) -> int:
        return sum(session.setbacks.failures[Cause.PREEMPTED] for session in self.sessions)

    @property
    def phase(self) -> State:
        """Where the request is; after an end before its time, where it was."""
        if self.failed_in is not None:
            return self.failed_in
        return next((s.state for s in self.sessions if not s.over), State.FINISHED)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event; `settle` is owed once all of the moment are applied."""
        match event:
            case TokensArrived():
                return self._one(event.choice, event, now)
            case Routed():
                return self._launch(event, now)
            case DecodeFinished() | StopMatched() | Restored() | WaitOver():
                return self._one(event.choice, event, now)
            case AttemptFailed(choice=int(choice)):
                return self._one(choice, event, now)
            case NoRoute():
                return self._several(event.choices, event, now)
            case WorkerGone(worker_id):
                return self._several(self._nearest_first(worker_id), event, now)
        return self._several(range(len(self.sessions)), event, now)

    def settle(self) -> list[Action]:
        """What is to be said to the workers, and which routes are to be chosen."""
        if not (self._leaving or self._needing):
            return []
        return [*self._cancels(), *self._routes()]

    def _one(self, choice: int, event: Event, now: float) -> list[Action]:
        if choice >= len(self.sessions):  # nobody asked for it
            return self._several(range(len(self.sessions)), Broken(Internal()), now)
        session = self.sessions[choice]
        before, actions = session.state, session.handle(event, now)
        if len(actions) == 1 and isinstance(actions[0], Emit):
            return actions  # nothing to note: a token among many
        return [*self._noted(session, before, actions), *self._spread_failure(now)]

    def _several(self, choices: Iterable[int], event: Event, now: float) -> list[Action]:
        """All of them have the event before the first failure ends them."""
        actions: list[Action] = []
        for choice in choices:
            session = self.sessions[choice]
            actions += self._noted(session, session.state, session.handle(event, now))
        return [*actions, *self._spread_failure(now)]

    def _nearest_first(self, worker_id: str) -> list[int]:
        """Choices that have this worker come before the others, which are to know of a death by then."""
        having = {s.choice for s in self.sessions if worker_id in s.working.values()}
        return sorted(range(len(self.sessions)), key=lambda choice: choice not in having)

    def _noted(self, session: ChoiceState, before: State, actions: list[Action]) -> list[Action]:
        """What is left to do at once; the rest waits for `settle`."""
        kept: list[Action] = []
        for action in actions:
            match action:
                case NeedRoute(choice):
                    self._needing.append(choice)
                case Cancel(role, worker_id, attempt, choices):
                    self._leaving.setdefault((role, worker_id, attempt), []).extend(choices)
                case Fail():
                    self._failure = self._failure or action
                case _:
                    kept.append(action)
        if self.failed_in is None and session.state in (State.FAILED, State.ABANDONED):
            self.failed_in = before
        return kept

    def _spread_failure(self, now: float) -> list[Action]:
        """The first failure of a choice is the end of all, and the one that the client hears of."""
        failure, self._failure = self._failure, None
        if failure is None:
            return []
        for session in self.sessions:
            self._noted(session, session.state, session.handle(Broken(failure.error), now))
        self._failure = None  # theirs
        return [failure]

    def _launch(self, event: Routed, now: float) -> list[Action]:
        """One attempt for all choices that still want it."""
        sessions = [self.sessions[c] for c in event.choices if self.sessions[c].wants_route]
        if not sessions:
            return []  # the request ended while its route was chosen
        self.attempts += 1
        if (cause := sessions[0].setbacks.lost_by) is not None:
            self.retries[cause] += 1
        for session in sessions:
            session.handle(Launched(self.attempts, event.prefill_id, event.decode_id), now)
        attempt = Attempt(
            self.attempts,
            self._tokens_of(sessions[0]),
            any(session.setbacks.reserve for session in sessions),
            tuple(session.choice for session in sessions),
            uncached=any(session.setbacks.uncached for session in sessions),
        )
        return [Attach(event.decode_id, attempt), Dispatch(event.prefill_id, event.decode_id, attempt)]

    def _cancels(self) -> list[Action]:
        """One message per worker and attempt. A prefill worker goes on while any choice waits for it."""
        leaving, self._leaving = self._leaving, {}
        staying: dict[tuple[Role, str, int], int] = {}
        for session in self.sessions:
            for role, worker_id in session.working.items():
                key = (role, worker_id, session.attempt)
                staying[key] = staying.get(key, 0) + 1
        actions: list[Action] = []
        for key, choices in leaving.items():
            if key not in staying:
                actions.append(Cancel(*key))
            elif key[0] is Role.DECODE:
                actions.append(Cancel(*key, tuple(sorted(choices))))
        return actions

    def _routes(self) -> list[Action]:
        needing, self._needing = self._needing, []
        groups: dict[tuple[int, ...], list[ChoiceState]] = {}
        for choice in needing:
            session = self.sessions[choice]
            if session.wants_route:
                groups.setdefault(tuple(session.output_ids), []).append(session)
        return [
            ChooseRoute(
                self._tokens_of(group[0]),
                frozenset().union(*(session.setbacks.avoid for session in group)),
                tuple(session.choice for session in group),
            )
            for group in groups.values()
        ]

    def _tokens_of(self, session: ChoiceState) -> tuple[int, ...]:
        return (*self._prompt_ids, *session.output_ids)
