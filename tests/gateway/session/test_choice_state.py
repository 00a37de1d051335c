"""The session against a model of two workers that may do anything: deliver, repeat, fail, die, be late."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diptych.runtime.errors import Internal, KvTransferFailed, NoReadyWorker, WorkerLost
from gateway.attempt.types import Cause, FinishReason, Role, TokenScore
from gateway.attempt.worker_events import AttemptFailed, DecodeFinished, PrefillCommitted, TokensArrived
from gateway.session.choice_state import ChoiceState
from gateway.session.request_limits import RequestLimits
from gateway.session.session_actions import Action, AwaitWorker, Cancel, Emit, Fail, Finish, NeedRoute
from gateway.session.session_events import (
    Admitted,
    CancelAsked,
    ClientGone,
    DeadlinePassed,
    Event,
    Launched,
    NoRoute,
    ShuttingDown,
    StopMatched,
    TimeLimitReached,
    WaitOver,
    WorkerGone,
    WorkerUp,
)
from gateway.session.transitions import TRANSITIONS, InvalidTransition, State

PROMPT = (7, 8, 9)


def started(max_tokens: int = 10, tally: RequestLimits | None = None, choice: int = 0) -> ChoiceState:
    session = ChoiceState(tally or RequestLimits(len(PROMPT), max_tokens), now=0.0, choice=choice)
    session.handle(Admitted(), 1.0)
    session.handle(Launched(1, "p", "d"), 2.0)
    return session


def test_the_way_to_the_workers() -> None:
    session = ChoiceState(RequestLimits(len(PROMPT), 10), now=0.0, choice=3)
    assert session.handle(Admitted(), 1.0) == [NeedRoute(3)]
    assert session.handle(Launched(1, "p", "d"), 2.0) == []
    assert session.working == {Role.PREFILL: "p", Role.DECODE: "d"}
    assert session.transitions == [(State.QUEUED, 0.0), (State.ROUTING, 1.0), (State.PREFILLING, 2.0)]


def test_events_out_of_turn_are_refused() -> None:
    session = started()
    with pytest.raises(InvalidTransition):
        session.handle(Admitted(), 3.0)
    with pytest.raises(InvalidTransition):
        session.handle(Launched(2, "p", "d"), 3.0)


def test_an_error_counts_what_all_choices_delivered() -> None:
    tally = RequestLimits(len(PROMPT), 10)
    first, second = started(tally=tally), started(tally=tally, choice=1)
    first.handle(TokensArrived(1, 0, (1, 2)), 3.0)
    failed = second.handle(AttemptFailed(1, Role.DECODE, Cause.INCOMPATIBLE), 4.0)[-1]
    assert isinstance(failed, Fail)
    assert failed.error.code.name == "ABORTED"
    assert failed.error.metadata == {"tokens_emitted": "2"}


def test_a_first_token_of_the_prefill_worker_goes_out_and_changes_nothing_else() -> None:
    """Where the request is, and so what a failure means, is for the decode worker to say."""
    session = started()
    assert session.handle(TokensArrived(1, 0, (10,), early=True), 3.0) == [Emit(0, (10,), 0)]
    assert session.state is State.PREFILLING
    assert session.handle(TokensArrived(1, 0, (10,)), 4.0) == []  # the same one
    assert session.state is State.DECODING
    assert session.handle(TokensArrived(1, 1, (11,)), 5.0) == [Emit(1, (11,), 0)]


def test_a_first_token_of_a_prefill_worker_that_was_slower_is_no_news() -> None:
    session = started()
    assert session.handle(TokensArrived(1, 0, (10, 11)), 3.0) == [Emit(0, (10, 11), 0)]
    assert session.handle(TokensArrived(1, 0, (10,), early=True), 4.0) == []
    assert session.output_ids == [10, 11]


def test_an_attempt_that_fails_after_its_first_token_goes_on_behind_it() -> None:
    session = started()
    session.handle(TokensArrived(1, 0, (10,), early=True), 3.0)
    assert session.handle(AttemptFailed(1, Role.DECODE, Cause.KV_TRANSFER_FAILED), 4.0)[-1] == NeedRoute(0)
    session.handle(Launched(2, "p", "d"), 5.0)
    assert session.handle(TokensArrived(1, 0, (10,)), 6.0) == []  # of the attempt that is over
    assert session.handle(TokensArrived(2, 1, (11,), early=True), 7.0) == [Emit(1, (11,), 0)]
    assert session.output_ids == [10, 11]


def test_scores_go_with_their_tokens() -> None:
    session = started()
    scores = tuple(TokenScore(-1.0, rank) for rank in range(4))
    session.handle(TokensArrived(1, 0, (10, 11), scores=scores[:2]), 3.0)
    (emit,) = session.handle(TokensArrived(1, 1, (11, 12, 13), scores=scores[1:]), 4.0)
    assert emit == Emit(2, (12, 13), 0, scores[2:])


@pytest.mark.parametrize(
    ("delivered", "cause", "error"),
    [
        (0, Cause.INCOMPATIBLE, NoReadyWorker("decode")),
        (2, Cause.INCOMPATIBLE, WorkerLost(2)),
        (1, Cause.INTERNAL, Internal()),
    ],
)
def test_failures_that_end_a_request(delivered: int, cause: Cause, error: Exception) -> None:
    session = started()
    if delivered:
        session.handle(TokensArrived(1, 0, tuple(range(delivered))), 3.0)
    *cancels, failed = session.handle(AttemptFailed(1, Role.DECODE, cause), 4.0)
    assert cancels == [Cancel(Role.PREFILL, "p", 1, (0,))]
    assert isinstance(failed, Fail)
    assert type(failed.error) is type(error)
    assert failed.error.code is error.code  # type: ignore[attr-defined]
    assert failed.error.metadata == error.metadata  # type: ignore[attr-defined]


def test_a_second_failed_handoff_ends_the_request_with_the_right_code() -> None:
    session = started()
    assert session.handle(AttemptFailed(1, Role.DECODE, Cause.KV_TRANSFER_FAILED), 3.0)[-1] == NeedRoute(0)
    assert session.handle(AttemptFailed(1, Role.PREFILL, Cause.KV_TRANSFER_FAILED), 3.0) == []  # its echo
    session.handle(Launched(2, "p", "d"), 4.0)
    failed = session.handle(AttemptFailed(2, Role.DECODE, Cause.KV_TRANSFER_FAILED), 5.0)[-1]
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, KvTransferFailed)


def test_preemption_after_the_last_token_is_the_end() -> None:
    session = started(max_tokens=2)
    session.handle(TokensArrived(1, 0, (1, 2)), 3.0)
    actions = session.handle(AttemptFailed(1, Role.DECODE, Cause.PREEMPTED), 4.0)
    assert actions[-1] == Finish(FinishReason.LENGTH)


def test_whether_a_grammar_was_complete_at_the_last_token_is_asked_again() -> None:
    session = started(tally=RequestLimits(len(PROMPT), 2, constrained=True))
    session.handle(TokensArrived(1, 0, (1, 2)), 3.0)
    assert session.handle(AttemptFailed(1, Role.DECODE, Cause.PREEMPTED), 4.0)[-1] == NeedRoute(0)
    session.handle(Launched(2, "p", "d"), 5.0)
    actions = session.handle(DecodeFinished(2, FinishReason.STOP), 6.0)
    assert actions[-1] == Finish(FinishReason.STOP)


def test_more_than_max_tokens_is_a_bug() -> None:
    session = started(max_tokens=2)
    actions = session.handle(TokensArrived(1, 0, (1, 2, 3)), 3.0)
    assert isinstance(actions[-1], Fail)
    assert not any(isinstance(action, Emit) for action in actions)


class SessionMachine(RuleBasedStateMachine):
    """The truth is one fixed text; workers deliver it from any place, in any pieces, any number of times."""

    TEXT = tuple(range(100, 112))

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.session = ChoiceState(RequestLimits(len(PROMPT), len(self.TEXT)), now=0.0)
        self.client: list[int] = []
        self.busy: dict[tuple[str, int], bool] = {}  # (worker, attempt) → not cancelled, no last word
        self.attempts = 0
        self.want_route = False
        self.waiting: AwaitWorker | None = None
        self.end: Action | None = None

    def feed(self, event: Event) -> None:
        self.now += 1.0
        over = self.session.over
        actions = self.session.handle(event, self.now)
        assert not (over and actions), "something happens after the end"
        for action in actions:
            self.perform(action)

    def perform(self, action: Action) -> None:
        assert self.end is None, "an action after the last one"
        match action:
            case NeedRoute():
                assert self.session.output_ids == self.client, "a token would be lost or doubled"
                assert not any(self.busy.values()), "two attempts at once"
                assert self.session.setbacks.reserve == (self.session.history.preemptions >= 2)
                self.want_route = True
            case AwaitWorker():
                assert self.attempts, "a request that no worker ever had waits"
                assert self.waiting is None, "two waits at once"
                self.waiting = action
            case Cancel(_, worker, number, (0,)):
                assert self.busy[worker, number], "a cancel for nothing"
                self.busy[worker, number] = False
            case Emit(position, token_ids):
                assert position == len(self.client)
                assert token_ids
                self.client.extend(token_ids)
            case Finish() | Fail():
                self.end = action

    def last_word(self, role: Role, number: int) -> None:
        if number == self.attempts:
            worker = self.session.working.get(role)
            if worker is not None:
                self.busy[worker, number] = False

    @precondition(lambda self: self.session.state is State.QUEUED)
    @rule()
    def admit(self) -> None:
        self.feed(Admitted())

    @precondition(lambda self: self.want_route and self.session.state is State.ROUTING)
    @rule(found=st.integers(0, 5))
    def route(self, found: int) -> None:
        self.want_route = False
        if found:
            self.waiting = None
            self.attempts = number = self.attempts + found
            self.busy[f"p{number}", number] = self.busy[f"d{number}", number] = True
            self.feed(Launched(number, f"p{number}", f"d{number}"))
        else:
            self.feed(NoRoute(Role.PREFILL))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def tokens(self, data: st.DataObject) -> None:
        attempt = data.draw(st.integers(1, self.attempts))
        start = data.draw(st.integers(0, len(self.client)))
        stop = data.draw(st.integers(start, len(self.TEXT)))
        self.feed(TokensArrived(attempt, start, self.TEXT[start:stop]))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), cause=st.sampled_from(Cause), role=st.sampled_from(Role))
    def fail(self, data: st.DataObject, cause: Cause, role: Role) -> None:
        attempt = data.draw(st.integers(1, self.attempts))
        self.last_word(role, attempt)
        self.feed(AttemptFailed(attempt, role, cause))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        attempt = data.draw(st.integers(1, self.attempts))
        self.last_word(Role.DECODE, attempt)
        self.feed(AttemptFailed(attempt, Role.DECODE, Cause.PREEMPTED))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        attempt = data.draw(st.integers(1, self.attempts))
        self.last_word(Role.PREFILL, attempt)
        self.feed(PrefillCommitted(attempt))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        attempt = data.draw(st.integers(1, self.attempts))
        self.last_word(Role.DECODE, attempt)
        self.feed(DecodeFinished(attempt, FinishReason.LENGTH))

    @precondition(lambda self: self.session.working)
    @rule(data=st.data())
    def lose_worker(self, data: st.DataObject) -> None:
        role = data.draw(st.sampled_from(sorted(self.session.working, key=str)))
        worker = self.session.working[role]
        self.busy[worker, self.attempts] = False
        self.feed(WorkerGone(worker, left=data.draw(st.booleans())))

    @rule(number=st.integers(1, 9), role=st.sampled_from("pd"), returned=st.booleans())
    def worker_comes(self, number: int, role: str, returned: bool) -> None:
        self.feed(WorkerUp(f"{role}{number}", returned))

    @precondition(lambda self: self.waiting)
    @rule()
    def nobody_comes(self) -> None:
        assert self.waiting is not None
        self.feed(WaitOver(self.waiting.choice, self.waiting.attempt))
        assert self.session.over

    @rule()
    def lose_a_stranger(self) -> None:
        before = self.session.state
        self.feed(WorkerGone("nobody"))
        assert self.session.state is before

    @precondition(lambda self: self.client and not self.session.over)
    @rule(data=st.data())
    def stop_string(self, data: st.DataObject) -> None:
        self.feed(StopMatched(data.draw(st.integers(1, len(self.client)))))

    @rule(
        event=st.sampled_from(
            [TimeLimitReached(), DeadlinePassed(), CancelAsked(), ShuttingDown(), ClientGone()]
        )
    )
    def interrupt(self, event: Event) -> None:
        self.feed(event)
        assert self.session.over

    @invariant()
    def the_client_has_a_beginning_of_the_text(self) -> None:
        assert tuple(self.client) == self.TEXT[: len(self.client)]

    @invariant()
    def nothing_runs_after_the_end(self) -> None:
        if self.session.over:
            assert not any(self.busy.values()), "a worker was left working"
            assert self.session.state is State.ABANDONED or self.end is not None
        else:
            routing = self.want_route or self.waiting is not None
            assert routing == (self.session.state is State.ROUTING)

    @invariant()
    def who_seems_to_have_killed_two_gets_no_third(self) -> None:
        history = self.session.history
        if history.deaths > 1:
            assert not any(self.busy.values())
        assert self.session.over or history.deaths - history.unproven <= 1

    @invariant()
    def every_move_was_legal_and_in_time(self) -> None:
        moves = self.session.transitions
        for (before, then), (after, now) in itertools.pairwise(moves):
            assert after in TRANSITIONS[before]
            assert then <= now

    @invariant()
    def unavailable_means_that_nothing_was_delivered(self) -> None:
        if isinstance(self.end, Fail) and self.end.error.code.name == "UNAVAILABLE":
            assert not self.client


TestSessionMachine = SessionMachine.TestCase
TestSessionMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
