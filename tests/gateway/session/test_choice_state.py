"""The state of a choice against a model of two workers that deliver, repeat, fail, die or are late."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diptych.runtime.errors import Internal, KvTransferFailed, NoReadyWorker, WorkerLost
from gateway.attempt.types import (
    AttemptFailed,
    Cause,
    DecodeFinished,
    FinishReason,
    ImagesDelivered,
    PrefillCommitted,
    Role,
    TokenLogprob,
    TokensArrived,
)
from gateway.session.attempt_history import RequestLimits
from gateway.session.choice_state import ChoiceState
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
    ShuttingDown,
    StopMatched,
    TimeLimitReached,
    WaitExpired,
    WorkerDown,
    WorkerUp,
)
from gateway.session.states import TRANSITIONS, InvalidTransition, State
from gateway.worker_pool.arrival_wait import FIRST_WAIT_S

PROMPT = (7, 8, 9)


def started(max_tokens: int = 10, limits: RequestLimits | None = None, index: int = 0) -> ChoiceState:
    choice = ChoiceState(limits or RequestLimits(len(PROMPT), max_tokens), now=0.0, index=index)
    choice.handle(Admitted(), 1.0)
    choice.handle(Launched(1, "p", "d"), 2.0)
    return choice


def test_choice_goes_from_queued_over_routing_to_prefilling() -> None:
    choice = ChoiceState(RequestLimits(len(PROMPT), 10), now=0.0, index=3)
    assert choice.handle(Admitted(), 1.0) == [NeedRoute(3)]
    assert choice.handle(Launched(1, "p", "d"), 2.0) == []
    assert choice.working == {Role.PREFILL: "p", Role.DECODE: "d"}
    assert choice.transitions == [(State.QUEUED, 0.0), (State.ROUTING, 1.0), (State.PREFILLING, 2.0)]


def test_handle_raises_on_events_out_of_turn() -> None:
    choice = started()
    with pytest.raises(InvalidTransition):
        choice.handle(Admitted(), 3.0)
    with pytest.raises(InvalidTransition):
        choice.handle(Launched(2, "p", "d"), 3.0)


def test_error_counts_the_tokens_delivered_to_all_choices() -> None:
    limits = RequestLimits(len(PROMPT), 10)
    first, second = started(limits=limits), started(limits=limits, index=1)
    first.handle(TokensArrived(1, 0, (1, 2)), 3.0)
    failed = second.handle(AttemptFailed(1, Role.DECODE, Cause.INCOMPATIBLE), 4.0)[-1]
    assert isinstance(failed, Fail)
    assert failed.error.code.name == "ABORTED"
    assert failed.error.metadata == {"tokens_emitted": "2"}


def test_early_first_token_is_emitted_without_a_change_of_state() -> None:
    """The state, and so the meaning of a failure, follows the decode worker."""
    choice = started()
    assert choice.handle(TokensArrived(1, 0, (10,), early=True), 3.0) == [Emit(0, (10,), 0)]
    assert choice.state is State.PREFILLING
    assert choice.handle(TokensArrived(1, 0, (10,)), 4.0) == []  # the same one
    assert choice.state is State.DECODING
    assert choice.handle(TokensArrived(1, 1, (11,)), 5.0) == [Emit(1, (11,), 0)]


def test_early_first_token_after_the_decode_workers_is_dropped() -> None:
    choice = started()
    assert choice.handle(TokensArrived(1, 0, (10, 11)), 3.0) == [Emit(0, (10, 11), 0)]
    assert choice.handle(TokensArrived(1, 0, (10,), early=True), 4.0) == []
    assert choice.output_ids == [10, 11]


def test_attempt_after_an_early_first_token_continues_behind_it() -> None:
    choice = started()
    choice.handle(TokensArrived(1, 0, (10,), early=True), 3.0)
    assert choice.handle(AttemptFailed(1, Role.DECODE, Cause.KV_TRANSFER_FAILED), 4.0)[-1] == NeedRoute(0)
    choice.handle(Launched(2, "p", "d"), 5.0)
    assert choice.handle(TokensArrived(1, 0, (10,)), 6.0) == []  # of the attempt that is over
    assert choice.handle(TokensArrived(2, 1, (11,), early=True), 7.0) == [Emit(1, (11,), 0)]
    assert choice.output_ids == [10, 11]


def test_logprobs_are_emitted_with_their_tokens() -> None:
    choice = started()
    logprobs = tuple(TokenLogprob(-1.0, rank) for rank in range(4))
    choice.handle(TokensArrived(1, 0, (10, 11), logprobs=logprobs[:2]), 3.0)
    (emit,) = choice.handle(TokensArrived(1, 1, (11, 12, 13), logprobs=logprobs[1:]), 4.0)
    assert emit == Emit(2, (12, 13), 0, logprobs[2:])


@pytest.mark.parametrize(
    ("delivered", "cause", "error"),
    [
        (0, Cause.INCOMPATIBLE, NoReadyWorker("decode")),
        (2, Cause.INCOMPATIBLE, WorkerLost(2)),
        (1, Cause.INTERNAL, Internal()),
    ],
)
def test_failure_without_retry_ends_the_request_with_its_error(
    delivered: int, cause: Cause, error: Exception
) -> None:
    choice = started()
    if delivered:
        choice.handle(TokensArrived(1, 0, tuple(range(delivered))), 3.0)
    *cancels, failed = choice.handle(AttemptFailed(1, Role.DECODE, cause), 4.0)
    assert cancels == [Cancel(Role.PREFILL, "p", 1, (0,))]
    assert isinstance(failed, Fail)
    assert type(failed.error) is type(error)
    assert failed.error.code is error.code  # type: ignore[attr-defined]
    assert failed.error.metadata == error.metadata  # type: ignore[attr-defined]


def test_second_failed_handoff_ends_the_request_with_kv_transfer_failed() -> None:
    choice = started()
    assert choice.handle(AttemptFailed(1, Role.DECODE, Cause.KV_TRANSFER_FAILED), 3.0)[-1] == NeedRoute(0)
    assert (
        choice.handle(AttemptFailed(1, Role.PREFILL, Cause.KV_TRANSFER_FAILED), 3.0) == []
    )  # the other report
    choice.handle(Launched(2, "p", "d"), 4.0)
    failed = choice.handle(AttemptFailed(2, Role.DECODE, Cause.KV_TRANSFER_FAILED), 5.0)[-1]
    assert isinstance(failed, Fail)
    assert isinstance(failed.error, KvTransferFailed)


def test_preemption_after_the_last_token_finishes_the_choice() -> None:
    choice = started(max_tokens=2)
    choice.handle(TokensArrived(1, 0, (1, 2)), 3.0)
    actions = choice.handle(AttemptFailed(1, Role.DECODE, Cause.PREEMPTED), 4.0)
    assert actions[-1] == Finish(FinishReason.LENGTH)


def test_constrained_choice_preempted_at_its_last_token_is_retried() -> None:
    choice = started(limits=RequestLimits(len(PROMPT), 2, constrained=True))
    choice.handle(TokensArrived(1, 0, (1, 2)), 3.0)
    assert choice.handle(AttemptFailed(1, Role.DECODE, Cause.PREEMPTED), 4.0)[-1] == NeedRoute(0)
    choice.handle(Launched(2, "p", "d"), 5.0)
    actions = choice.handle(DecodeFinished(2, FinishReason.STOP), 6.0)
    assert actions[-1] == Finish(FinishReason.STOP)


def test_more_than_max_tokens_fails_the_request() -> None:
    choice = started(max_tokens=2)
    actions = choice.handle(TokensArrived(1, 0, (1, 2, 3)), 3.0)
    assert isinstance(actions[-1], Fail)
    assert not any(isinstance(action, Emit) for action in actions)


class ChoiceMachine(RuleBasedStateMachine):
    """A choice with one fixed text, delivered from any position, in any pieces, any number of times."""

    TEXT = tuple(range(100, 112))

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.choice = ChoiceState(RequestLimits(len(PROMPT), len(self.TEXT)), now=0.0)
        self.client: list[int] = []
        self.busy: dict[tuple[str, int], bool] = {}  # (worker, attempt) → not cancelled, no terminal message
        self.attempts = 0
        self.want_route = False
        self.waiting: AwaitWorker | None = None
        self.end: Action | None = None

    def feed(self, event: Event) -> None:
        self.now += 1.0
        over = self.choice.over
        actions = self.choice.handle(event, self.now)
        assert not (over and actions), "something happens after the end"
        for action in actions:
            self.perform(action)

    def perform(self, action: Action) -> None:
        assert self.end is None, "an action after the last one"
        match action:
            case NeedRoute():
                assert self.choice.output_ids == self.client, "a token would be lost or doubled"
                assert not any(self.busy.values()), "two attempts at once"
                assert self.choice.history.reserve == (self.choice.retry_context.preemptions >= 2)
                self.want_route = True
            case AwaitWorker():
                assert self.attempts or action.seconds <= FIRST_WAIT_S, "the first wait is too long"
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

    def terminal_message(self, role: Role, number: int) -> None:
        if number == self.attempts:
            worker = self.choice.working.get(role)
            if worker is not None:
                self.busy[worker, number] = False

    @precondition(lambda self: self.choice.state is State.QUEUED)
    @rule()
    def admit(self) -> None:
        self.feed(Admitted())

    @precondition(lambda self: self.want_route and self.choice.state is State.ROUTING)
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
        self.terminal_message(role, attempt)
        self.feed(AttemptFailed(attempt, role, cause))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        attempt = data.draw(st.integers(1, self.attempts))
        self.terminal_message(Role.DECODE, attempt)
        self.feed(AttemptFailed(attempt, Role.DECODE, Cause.PREEMPTED))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        attempt = data.draw(st.integers(1, self.attempts))
        self.terminal_message(Role.PREFILL, attempt)
        self.feed(PrefillCommitted(attempt))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        attempt = data.draw(st.integers(1, self.attempts))
        self.terminal_message(Role.DECODE, attempt)
        self.feed(DecodeFinished(attempt, FinishReason.LENGTH))

    @precondition(lambda self: self.choice.working)
    @rule(data=st.data())
    def lose_worker(self, data: st.DataObject) -> None:
        role = data.draw(st.sampled_from(sorted(self.choice.working, key=str)))
        worker = self.choice.working[role]
        self.busy[worker, self.attempts] = False
        self.feed(WorkerDown(worker, graceful=data.draw(st.booleans())))

    @rule(number=st.integers(1, 9), role=st.sampled_from("pd"), same_process=st.booleans())
    def worker_comes(self, number: int, role: str, same_process: bool) -> None:
        self.feed(WorkerUp(f"{role}{number}", same_process))

    @precondition(lambda self: self.waiting)
    @rule()
    def no_worker_comes(self) -> None:
        assert self.waiting is not None
        self.feed(WaitExpired(self.waiting.choice, self.waiting.attempt))
        assert self.choice.over

    @rule()
    def lose_another_worker(self) -> None:
        before = self.choice.state
        self.feed(WorkerDown("other"))
        assert self.choice.state is before

    @precondition(lambda self: self.client and not self.choice.over)
    @rule(data=st.data())
    def stop_string(self, data: st.DataObject) -> None:
        self.feed(StopMatched(data.draw(st.integers(1, len(self.client)))))

    @rule(
        event=st.sampled_from(
            [TimeLimitReached(), DeadlinePassed(), CancelRequested(), ShuttingDown(), ClientGone()]
        )
    )
    def interrupt(self, event: Event) -> None:
        self.feed(event)
        assert self.choice.over

    @invariant()
    def the_client_has_a_beginning_of_the_text(self) -> None:
        assert tuple(self.client) == self.TEXT[: len(self.client)]

    @invariant()
    def nothing_runs_after_the_end(self) -> None:
        if self.choice.over:
            assert not any(self.busy.values()), "a worker was left working"
            assert self.choice.state is State.ABANDONED or self.end is not None
        else:
            routing = self.want_route or self.waiting is not None
            assert routing == (self.choice.state is State.ROUTING)

    @invariant()
    def two_deaths_keep_a_third_worker_away(self) -> None:
        context = self.choice.retry_context
        if context.deaths > 1:
            assert not any(self.busy.values())
        assert self.choice.over or context.deaths - context.unconfirmed <= 1

    @invariant()
    def every_move_was_legal_and_in_time(self) -> None:
        moves = self.choice.transitions
        for (before, then), (after, now) in itertools.pairwise(moves):
            assert after in TRANSITIONS[before]
            assert then <= now

    @invariant()
    def unavailable_means_that_nothing_was_delivered(self) -> None:
        if isinstance(self.end, Fail) and self.end.error.code.name == "UNAVAILABLE":
            assert not self.client


TestChoiceMachine = ChoiceMachine.TestCase
TestChoiceMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def with_encoder(limits: RequestLimits | None = None) -> ChoiceState:
    choice = ChoiceState(limits or RequestLimits(len(PROMPT), 10), now=0.0)
    choice.handle(Admitted(), 1.0)
    choice.handle(Launched(1, "p", "d", "e"), 2.0)
    return choice


def test_an_encode_worker_works_until_its_rows_are_delivered() -> None:
    choice = with_encoder()
    assert choice.working == {Role.PREFILL: "p", Role.DECODE: "d", Role.ENCODE: "e"}
    assert choice.handle(ImagesDelivered(7), 3.0) == []
    assert Role.ENCODE in choice.working
    assert choice.handle(ImagesDelivered(1), 3.0) == []
    assert choice.working == {Role.PREFILL: "p", Role.DECODE: "d"}
    assert choice.handle(WorkerDown("e"), 4.0) == []
    assert choice.state is State.PREFILLING


def test_an_encode_worker_that_dies_before_costs_the_attempt() -> None:
    choice = with_encoder()
    actions = choice.handle(WorkerDown("e"), 3.0)
    assert Cancel(Role.DECODE, "d", 1, (0,)) in actions
    assert Cancel(Role.PREFILL, "p", 1, (0,)) in actions
    assert actions[-1] == NeedRoute(0)
    assert choice.retry_context.deaths == 1


def test_a_prefill_worker_without_rows_blames_the_encode_worker() -> None:
    limits = RequestLimits(len(PROMPT), 10)
    choice = with_encoder(limits)
    actions = choice.handle(AttemptFailed(1, Role.PREFILL, Cause.ENCODER_LOST), 3.0)
    assert Cancel(Role.ENCODE, "e", 1, (0,)) in actions
    assert actions[-1] == NeedRoute(0)
    assert choice.history.avoid == {"e"}
    assert limits.failed_workers.is_suspect("e", 3.0)
    assert choice.retry_context.losses == 1


def test_an_image_that_cannot_be_encoded_blames_the_encode_worker_alone() -> None:
    choice = with_encoder()
    choice.handle(AttemptFailed(1, Role.ENCODE, Cause.COMPUTE_FAILED), 3.0)
    assert choice.history.avoid == {"e"}
    choice.handle(Launched(2, "p", "d"), 4.0)
    failed = choice.handle(AttemptFailed(2, Role.PREFILL, Cause.COMPUTE_FAILED), 5.0)[-1]
    assert isinstance(failed, Fail)


def test_a_lost_peer_is_never_the_encode_worker() -> None:
    choice = with_encoder()
    choice.handle(AttemptFailed(1, Role.PREFILL, Cause.PEER_LOST), 3.0)
    assert choice.history.avoid == {"d"}


def test_a_commit_ends_the_work_of_an_encode_worker_that_does_not_know_it() -> None:
    choice = with_encoder()
    assert choice.handle(PrefillCommitted(1), 3.0) == [Cancel(Role.ENCODE, "e", 1, (0,))]
    assert choice.working == {Role.DECODE: "d"}
