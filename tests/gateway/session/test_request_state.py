"""Several choices of one request against a model of workers that may do anything at any time."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diptych.runtime.errors import DeadlineExceeded, Internal, WorkerLost
from gateway.attempt.types import Cause, FinishReason, Role
from gateway.attempt.worker_events import AttemptFailed, DecodeFinished, PrefillCommitted, TokensArrived
from gateway.session.request_state import RequestState
from gateway.session.retry_budget import RetryBudget
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
    Admitted,
    Broken,
    CancelAsked,
    ClientGone,
    DeadlinePassed,
    Event,
    NoRoute,
    Routed,
    ShuttingDown,
    StopMatched,
    TimeLimitReached,
    WaitOver,
    WorkerGone,
    WorkerUp,
)
from gateway.session.transitions import State

PROMPT = (7, 8, 9)


def moment(choices: RequestState, *events: Event) -> list[Action]:
    """Everything that follows from events of one moment."""
    actions: list[Action] = []
    for event in events:
        actions += choices.handle(event, 1.0)
    return actions + choices.settle()


def started(count: int, budget: RetryBudget | None = None) -> RequestState:
    """All of them in attempt 1, on workers p and d."""
    choices = RequestState(PROMPT, 10, count, now=0.0, budget=budget)
    (route,) = moment(choices, Admitted())
    assert isinstance(route, ChooseRoute)
    moment(choices, Routed("p", "d", route.choices))
    return choices


def preempted(attempt: int, choice: int) -> AttemptFailed:
    return AttemptFailed(attempt, Role.DECODE, Cause.PREEMPTED, choice)


def test_all_choices_share_the_first_attempt() -> None:
    choices = RequestState(PROMPT, 10, 3, now=0.0)
    assert moment(choices, Admitted()) == [ChooseRoute(PROMPT, frozenset(), (0, 1, 2))]
    attach, dispatch = moment(choices, Routed("p", "d", (0, 1, 2)))
    assert isinstance(attach, Attach)
    assert isinstance(dispatch, Dispatch)
    assert attach.attempt == dispatch.attempt
    assert (attach.attempt.number, attach.attempt.choices) == (1, (0, 1, 2))
    assert (attach.worker_id, dispatch.worker_id, dispatch.decode_id) == ("d", "p", "d")


def test_a_preempted_choice_goes_on_alone_with_its_own_tokens() -> None:
    choices = started(3)
    for choice in range(3):
        moment(choices, TokensArrived(1, 0, (choice,), choice))
    *cancels, route = moment(choices, preempted(1, 1))
    assert cancels == []  # the prefill worker may still be at it for the others
    assert route == ChooseRoute((*PROMPT, 1), frozenset(), (1,))
    attach, _ = moment(choices, Routed("p", "d", (1,)))
    assert isinstance(attach, Attach)
    assert (attach.attempt.number, attach.attempt.choices) == (2, (1,))
    assert moment(choices, TokensArrived(1, 1, (5,), 0)) == [Emit(1, (5,), 0)]
    assert moment(choices, TokensArrived(1, 1, (5,), 1)) == []  # late, of its old attempt
    assert moment(choices, TokensArrived(2, 1, (6,), 1)) == [Emit(1, (6,), 1)]
    assert (choices.preemptions, choices.retries[Cause.PREEMPTED]) == (1, 1)


def test_choices_with_equal_tokens_that_fail_together_go_on_together() -> None:
    choices = started(3)
    moment(choices, TokensArrived(1, 0, (4,), 0), TokensArrived(1, 0, (4,), 1), TokensArrived(1, 0, (5,), 2))
    moment(choices, PrefillCommitted(1))
    assert moment(choices, *(preempted(1, choice) for choice in range(3))) == [
        ChooseRoute((*PROMPT, 4), frozenset(), (0, 1)),
        ChooseRoute((*PROMPT, 5), frozenset(), (2,)),
    ]


def test_a_failed_prefill_concerns_all_choices_of_the_attempt() -> None:
    choices = started(2)
    actions = moment(choices, AttemptFailed(1, Role.PREFILL, Cause.DRAINING))
    assert actions == [Cancel(Role.DECODE, "d", 1), ChooseRoute(PROMPT, frozenset({"p"}), (0, 1))]


def test_a_stop_string_ends_one_choice_and_the_last_one_frees_the_prefill_worker() -> None:
    choices = started(2)
    moment(choices, TokensArrived(1, 0, (1,), 0), TokensArrived(1, 0, (2,), 1))
    finish = Finish(FinishReason.STOP, 0)
    assert moment(choices, StopMatched(1, 0)) == [finish, Cancel(Role.DECODE, "d", 1, (0,))]
    assert not choices.over
    finish = Finish(FinishReason.STOP, 1)
    actions = moment(choices, StopMatched(1, 1))
    assert actions == [finish, Cancel(Role.DECODE, "d", 1), Cancel(Role.PREFILL, "p", 1)]
    assert choices.over


def test_one_choice_that_gives_up_ends_the_request_with_one_error() -> None:
    choices = started(3)
    moment(choices, DecodeFinished(1, FinishReason.LENGTH, 2))
    actions = moment(choices, AttemptFailed(1, Role.DECODE, Cause.INTERNAL, 0))
    (failed,) = (action for action in actions if isinstance(action, Fail))
    assert isinstance(failed.error, Internal)
    assert choices.over
    assert [a for a in actions if isinstance(a, Cancel)] == [
        Cancel(Role.PREFILL, "p", 1),
        Cancel(Role.DECODE, "d", 1),
    ]


def test_a_choice_that_nobody_asked_for_is_a_bug_of_the_worker() -> None:
    choices = started(2)
    actions = moment(choices, TokensArrived(1, 0, (1,), 2))
    assert any(isinstance(action, Fail) and isinstance(action.error, Internal) for action in actions)


def under_two_deaths(choices: RequestState) -> list[Action]:
    """The second death, under choice 1 alone; choice 0 has other workers by then."""
    moment(choices, AttemptFailed(1, Role.DECODE, Cause.KV_TRANSFER_FAILED, 0))
    moment(choices, Routed("p2", "d2", (0,)))
    moment(choices, WorkerGone("d"))
    moment(choices, Routed("p3", "d3", (1,)))
    return moment(choices, WorkerGone("d3"))


def test_two_deaths_under_one_choice_take_the_others_from_their_workers_too() -> None:
    choices = started(2)
    actions = under_two_deaths(choices)
    assert [a.choice for a in actions if isinstance(a, AwaitWorker)] == [1, 0]
    cancelled = {(a.worker_id, a.attempt) for a in actions if isinstance(a, Cancel)}
    assert cancelled == {("d2", 2), ("p2", 2), ("p3", 3)}
    assert not any(session.working for session in choices.sessions)


@pytest.mark.parametrize("prefills", [3, 4])
def test_whoever_is_taken_from_its_workers_pays_for_its_next_prefill(prefills: int) -> None:
    choices = started(2, budget=RetryBudget(prefills))
    (failed,) = [a for a in under_two_deaths(choices) if isinstance(a, Fail)] or (None,)
    assert choices.over == (prefills == 3)
    assert (failed is not None and isinstance(failed.error, WorkerLost)) == choices.over


@pytest.mark.parametrize("event", [TimeLimitReached(), CancelAsked()])
def test_what_ends_a_request_well_ends_all_its_choices(event: Event) -> None:
    choices = started(2)
    actions = moment(choices, event)
    assert [a.choice for a in actions if isinstance(a, Finish)] == [0, 1]


def test_the_deadline_names_the_phase_and_the_place_is_remembered() -> None:
    choices = started(2)
    moment(choices, TokensArrived(1, 0, (1,), 1))
    actions = moment(choices, DeadlinePassed())
    (failed,) = (action for action in actions if isinstance(action, Fail))
    assert isinstance(failed.error, DeadlineExceeded)
    assert choices.phase is State.PREFILLING  # the first choice is not further yet


class ChoicesMachine(RuleBasedStateMachine):
    """The truth is one text for each choice; the first two tokens of all are the same."""

    COUNT = 3
    LENGTH = 6

    @initialize()
    def begin(self) -> None:
        self.texts = [(1, 2, *(10 * c + i for i in range(4))) for c in range(self.COUNT)]
        self.choices = RequestState(PROMPT, self.LENGTH, self.COUNT, now=0.0)
        self.client: list[list[int]] = [[] for _ in range(self.COUNT)]
        self.ended: dict[int, Action] = {}
        self.error: Fail | None = None
        self.prefill: dict[int, str] = {}  # attempt → worker that is busy with it
        self.decode: dict[int, tuple[str, set[int]]] = {}  # attempt → worker, and choices it is busy with
        self.asked: list[ChooseRoute] = []
        self.waiting: dict[int, AwaitWorker] = {}  # choices for which there was no worker
        self.decode_ever: set[int] = set()  # attempts that were launched
        self.just_ended: set[int] = set()  # choices with a last word at this moment

    def feed(self, *events: Event) -> None:
        over = self.choices.over
        actions: list[Action] = []
        for event in events:
            actions += self.choices.handle(event, 1.0)
        for action in actions + self.choices.settle():
            assert not over, "something happens after the end"
            self.perform(action)
        self.just_ended.clear()

    def perform(self, action: Action) -> None:
        match action:
            case ChooseRoute(token_ids, _, choices):
                for choice in choices:
                    assert token_ids == (*PROMPT, *self.client[choice]), "a token would be lost or doubled"
                    assert not any(choice in busy for _, busy in self.decode.values()), "two attempts at once"
                self.asked.append(action)
            case AwaitWorker(choice):
                assert choice not in self.waiting, "two waits at once"
                self.waiting[choice] = action
            case Attach(worker, attempt):
                assert attempt.number == len(self.decode_ever) + 1
                self.decode_ever.add(attempt.number)
                self.waiting = {c: wait for c, wait in self.waiting.items() if c not in attempt.choices}
                self.decode[attempt.number] = (worker, set(attempt.choices))
            case Dispatch(worker, _, attempt):
                self.prefill[attempt.number] = worker
            case Cancel(Role.PREFILL, worker, number, choices):
                assert choices == ()
                assert self.prefill.pop(number) == worker, "a cancel for nothing"
            case Cancel(Role.DECODE, worker, number, choices):
                assert self.decode[number][0] == worker
                busy = self.decode[number][1]
                # What was said at the same moment, after the word that ended the request, may be cancelled.
                assert busy or self.just_ended, "a cancel for nothing"
                assert set(choices) <= busy | self.just_ended
                assert not choices or set(choices) != busy, "all of them need no names"
                busy -= set(choices) or set(busy)
            case Emit(position, token_ids, choice):
                assert position == len(self.client[choice])
                assert choice not in self.ended
                self.client[choice].extend(token_ids)
            case Finish(_, choice):
                assert choice not in self.ended
                self.ended[choice] = action
            case Fail():
                assert self.error is None, "two errors"
                self.error = action

    @precondition(lambda self: self.choices.sessions[0].state is State.QUEUED)
    @rule()
    def admit(self) -> None:
        self.feed(Admitted())

    @precondition(lambda self: self.asked)
    @rule(found=st.integers(0, 9))
    def route(self, found: int) -> None:
        wanted = self.asked.pop(0)
        if found:
            self.feed(Routed(f"p{found}", f"d{found}", wanted.choices))
        else:
            self.feed(NoRoute(Role.DECODE, wanted.choices))

    def attempt_of(self, data: st.DataObject) -> int:
        return data.draw(st.integers(1, len(self.decode_ever)))

    def some(self, data: st.DataObject) -> Iterable[int]:
        return data.draw(st.lists(st.integers(0, self.COUNT - 1), min_size=1, max_size=3, unique=True))

    def last_word(self, attempt: int, choices: Iterable[int]) -> None:
        """Only what the gateway still listens to counts: a worker that was cancelled is silent."""
        if attempt in self.decode:
            self.decode[attempt][1].difference_update(choices)
            self.just_ended.update(choices)

    @precondition(lambda self: self.decode_ever)
    @rule(data=st.data())
    def tokens(self, data: st.DataObject) -> None:
        attempt = self.attempt_of(data)
        events: list[Event] = []
        for choice in self.some(data):
            start = data.draw(st.integers(0, len(self.client[choice])))
            stop = data.draw(st.integers(start, self.LENGTH))
            events.append(TokensArrived(attempt, start, self.texts[choice][start:stop], choice))
        self.feed(*events)

    @precondition(lambda self: self.decode_ever)
    @rule(data=st.data(), cause=st.sampled_from([*Cause, Cause.PREEMPTED, Cause.PREEMPTED]))
    def decode_fails(self, data: st.DataObject, cause: Cause) -> None:
        attempt = self.attempt_of(data)
        choices = [c for c in self.some(data) if attempt in self.decode and c in self.decode[attempt][1]]
        self.last_word(attempt, choices)
        self.feed(*(AttemptFailed(attempt, Role.DECODE, cause, choice) for choice in choices))

    @precondition(lambda self: self.prefill)
    @rule(data=st.data(), cause=st.sampled_from([Cause.KV_TRANSFER_FAILED, Cause.DRAINING, Cause.INTERNAL]))
    def prefill_fails(self, data: st.DataObject, cause: Cause) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.prefill)))
        del self.prefill[attempt]
        self.feed(AttemptFailed(attempt, Role.PREFILL, cause))

    @precondition(lambda self: self.prefill)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.prefill)))
        del self.prefill[attempt]
        self.feed(PrefillCommitted(attempt))

    @precondition(lambda self: self.decode_ever)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        attempt = self.attempt_of(data)
        choices = [c for c in self.some(data) if attempt in self.decode and c in self.decode[attempt][1]]
        self.last_word(attempt, choices)
        self.feed(*(DecodeFinished(attempt, FinishReason.LENGTH, choice) for choice in choices))

    @precondition(lambda self: self.decode_ever)
    @rule(data=st.data(), decode=st.booleans())
    def lose_worker(self, data: st.DataObject, decode: bool) -> None:
        busy = {w for w, choices in self.decode.values() if choices} if decode else set(self.prefill.values())
        if not busy:
            return
        worker = data.draw(st.sampled_from(sorted(busy)))
        for name, choices in self.decode.values():
            if name == worker:
                choices.clear()
        self.prefill = {a: w for a, w in self.prefill.items() if w != worker}
        self.feed(WorkerGone(worker, left=data.draw(st.booleans())))

    @rule(number=st.integers(1, 9), role=st.sampled_from("pd"), returned=st.booleans())
    def worker_comes(self, number: int, role: str, returned: bool) -> None:
        self.feed(WorkerUp(f"{role}{number}", returned))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def nobody_comes(self, data: st.DataObject) -> None:
        wait = self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))]
        self.feed(WaitOver(wait.choice, wait.attempt))
        assert self.choices.over

    @rule(data=st.data())
    def stop_string(self, data: st.DataObject) -> None:
        choice = data.draw(st.integers(0, self.COUNT - 1))
        if self.client[choice]:
            self.feed(StopMatched(data.draw(st.integers(1, len(self.client[choice]))), choice))

    @precondition(lambda self: len(self.decode_ever) > 2)
    @rule(
        event=st.sampled_from(
            [
                *(TimeLimitReached(), DeadlinePassed(), CancelAsked()),
                *(ShuttingDown(), ClientGone(), Broken(Internal())),
            ]
        )
    )
    def interrupt(self, event: Event) -> None:
        self.feed(event)
        assert self.choices.over

    @invariant()
    def each_client_has_a_beginning_of_its_text(self) -> None:
        for text, got in zip(self.texts, self.client, strict=True):
            assert tuple(got) == text[: len(got)]

    @invariant()
    def nothing_runs_after_the_end(self) -> None:
        if not self.choices.over:
            return
        assert not self.prefill, "a prefill worker was left working"
        assert not any(choices for _, choices in self.decode.values()), "a decode worker was left working"
        if self.error is None and self.choices.failed_in is None:
            assert len(self.ended) == self.COUNT

    @invariant()
    def who_seems_to_have_killed_two_gets_no_third(self) -> None:
        history = self.choices.sessions[0].history
        if history.deaths > 1:
            assert not any(session.working for session in self.choices.sessions)
        assert self.choices.over or history.deaths - history.unproven <= 1

    @invariant()
    def no_choice_is_forgotten(self) -> None:
        waiting = {choice for wanted in self.asked for choice in wanted.choices} | set(self.waiting)
        for session in self.choices.sessions:
            if session.state is State.ROUTING:
                assert session.choice in waiting
            if session.state in (State.PREFILLING, State.DECODING):
                assert session.choice in self.decode[session.attempt][1]

    @invariant()
    def unavailable_means_that_nothing_was_delivered(self) -> None:
        if self.error is not None and self.error.error.code.name == "UNAVAILABLE":
            assert not any(self.client)


TestChoicesMachine = ChoicesMachine.TestCase
TestChoicesMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
