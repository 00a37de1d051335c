"""The state of a request with several choices, against a model of workers that do anything at any time."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diptych.runtime.errors import DeadlineExceeded, Internal, WorkerLost
from gateway.attempt.types import (
    AttemptFailed,
    Cause,
    DecodeFinished,
    FinishReason,
    LocalPrefill,
    PrefillCommitted,
    Role,
    TokensArrived,
)
from gateway.session.events import (
    Action,
    Admitted,
    Attach,
    AwaitWorker,
    Cancel,
    CancelRequested,
    ChooseRoute,
    ClientGone,
    DeadlinePassed,
    Dispatch,
    Emit,
    Event,
    Fail,
    Finish,
    NoRoute,
    RequestFailed,
    Routed,
    ShuttingDown,
    StopMatched,
    TimeLimitReached,
    WaitExpired,
    WorkerDown,
    WorkerUp,
)
from gateway.session.request_state import RequestState
from gateway.session.retry_policy import RetryBudget
from gateway.session.states import State

PROMPT = (7, 8, 9)


def moment(request: RequestState, *events: Event) -> list[Action]:
    """Return all actions that follow from events of one moment."""
    actions: list[Action] = []
    for event in events:
        actions += request.handle(event, 1.0)
    return actions + request.settle()


def started(count: int, budget: RetryBudget | None = None) -> RequestState:
    """Return a request with all its choices in attempt 1, on workers p and d."""
    request = RequestState(PROMPT, 10, count, now=0.0, budget=budget)
    (route,) = moment(request, Admitted())
    assert isinstance(route, ChooseRoute)
    moment(request, Routed("p", "d", route.choices))
    return request


def preempted(attempt: int, choice: int) -> AttemptFailed:
    return AttemptFailed(attempt, Role.DECODE, Cause.PREEMPTED, choice)


def test_all_choices_share_the_first_attempt() -> None:
    request = RequestState(PROMPT, 10, 3, now=0.0)
    assert moment(request, Admitted()) == [ChooseRoute(PROMPT, frozenset(), (0, 1, 2))]
    attach, dispatch = moment(request, Routed("p", "d", (0, 1, 2)))
    assert isinstance(attach, Attach)
    assert isinstance(dispatch, Dispatch)
    assert attach.attempt == dispatch.attempt
    assert (attach.attempt.number, attach.attempt.choices) == (1, (0, 1, 2))
    assert (attach.worker_id, dispatch.worker_id, dispatch.decode_id) == ("d", "p", "d")


def test_preempted_choice_continues_alone_with_its_own_tokens() -> None:
    request = started(3)
    for choice in range(3):
        moment(request, TokensArrived(1, 0, (choice,), choice))
    *cancels, route = moment(request, preempted(1, 1))
    assert cancels == []  # the prefill worker may still be at it for the others
    assert route == ChooseRoute((*PROMPT, 1), frozenset(), (1,))
    attach, _ = moment(request, Routed("p", "d", (1,)))
    assert isinstance(attach, Attach)
    assert (attach.attempt.number, attach.attempt.choices) == (2, (1,))
    assert moment(request, TokensArrived(1, 1, (5,), 0)) == [Emit(1, (5,), 0)]
    assert moment(request, TokensArrived(1, 1, (5,), 1)) == []  # late, of its old attempt
    assert moment(request, TokensArrived(2, 1, (6,), 1)) == [Emit(1, (6,), 1)]
    assert (request.preemptions, request.retries[Cause.PREEMPTED]) == (1, 1)


def test_choices_with_equal_tokens_that_fail_together_share_the_next_attempt() -> None:
    request = started(3)
    moment(request, TokensArrived(1, 0, (4,), 0), TokensArrived(1, 0, (4,), 1), TokensArrived(1, 0, (5,), 2))
    moment(request, PrefillCommitted(1))
    assert moment(request, *(preempted(1, choice) for choice in range(3))) == [
        ChooseRoute((*PROMPT, 4), frozenset(), (0, 1)),
        ChooseRoute((*PROMPT, 5), frozenset(), (2,)),
    ]


def test_failed_prefill_reroutes_all_choices_of_the_attempt() -> None:
    request = started(2)
    actions = moment(request, AttemptFailed(1, Role.PREFILL, Cause.DRAINING))
    assert actions == [Cancel(Role.DECODE, "d", 1), ChooseRoute(PROMPT, frozenset({"p"}), (0, 1))]


def test_stop_string_cancels_one_choice_and_the_last_one_the_prefill_worker() -> None:
    request = started(2)
    moment(request, TokensArrived(1, 0, (1,), 0), TokensArrived(1, 0, (2,), 1))
    finish = Finish(FinishReason.STOP, 0)
    assert moment(request, StopMatched(1, 0)) == [finish, Cancel(Role.DECODE, "d", 1, (0,))]
    assert not request.over
    finish = Finish(FinishReason.STOP, 1)
    actions = moment(request, StopMatched(1, 1))
    assert actions == [finish, Cancel(Role.DECODE, "d", 1), Cancel(Role.PREFILL, "p", 1)]
    assert request.over


def test_one_failed_choice_ends_the_request_with_one_error() -> None:
    request = started(3)
    moment(request, DecodeFinished(1, FinishReason.LENGTH, 2))
    actions = moment(request, AttemptFailed(1, Role.DECODE, Cause.INTERNAL, 0))
    (failed,) = (action for action in actions if isinstance(action, Fail))
    assert isinstance(failed.error, Internal)
    assert request.over
    assert [a for a in actions if isinstance(a, Cancel)] == [
        Cancel(Role.PREFILL, "p", 1),
        Cancel(Role.DECODE, "d", 1),
    ]


def test_tokens_of_an_unknown_choice_fail_the_request() -> None:
    request = started(2)
    actions = moment(request, TokensArrived(1, 0, (1,), 2))
    assert any(isinstance(action, Fail) and isinstance(action.error, Internal) for action in actions)


def under_two_deaths(request: RequestState) -> list[Action]:
    """Return the actions after a second death under choice 1; choice 0 has other workers by then."""
    moment(request, AttemptFailed(1, Role.DECODE, Cause.KV_TRANSFER_FAILED, 0))
    moment(request, Routed("p2", "d2", (0,)))
    moment(request, PrefillCommitted(1), WorkerDown("d"))
    moment(request, Routed("p3", "d3", (1,)), PrefillCommitted(3))
    return moment(request, WorkerDown("d3"))


def test_two_deaths_under_one_choice_suspend_all_choices() -> None:
    request = started(2)
    actions = under_two_deaths(request)
    assert [a.choice for a in actions if isinstance(a, AwaitWorker)] == [1, 0]
    cancelled = {(a.worker_id, a.attempt) for a in actions if isinstance(a, Cancel)}
    assert cancelled == {("d2", 2), ("p2", 2)}
    assert not any(choice.working for choice in request.choices)


@pytest.mark.parametrize("prefills", [3, 4])
def test_suspended_choice_is_charged_to_the_retry_budget(prefills: int) -> None:
    request = started(2, budget=RetryBudget(prefills))
    (failed,) = [a for a in under_two_deaths(request) if isinstance(a, Fail)] or (None,)
    assert request.over == (prefills == 3)
    assert (failed is not None and isinstance(failed.error, WorkerLost)) == request.over


@pytest.mark.parametrize("event", [TimeLimitReached(), CancelRequested()])
def test_time_limit_and_cancel_finish_all_choices(event: Event) -> None:
    request = started(2)
    actions = moment(request, event)
    assert [a.choice for a in actions if isinstance(a, Finish)] == [0, 1]


def test_deadline_error_names_the_phase_and_the_request_keeps_it() -> None:
    request = started(2)
    moment(request, TokensArrived(1, 0, (1,), 1))
    actions = moment(request, DeadlinePassed())
    (failed,) = (action for action in actions if isinstance(action, Fail))
    assert isinstance(failed.error, DeadlineExceeded)
    assert request.phase is State.PREFILLING  # the first choice is not further yet


class ChoicesMachine(RuleBasedStateMachine):
    """A request with one fixed text for each choice; the first two tokens of all are the same."""

    COUNT = 3
    LENGTH = 6

    @initialize()
    def begin(self) -> None:
        self.texts = [(1, 2, *(10 * c + i for i in range(4))) for c in range(self.COUNT)]
        self.request = RequestState(PROMPT, self.LENGTH, self.COUNT, now=0.0)
        self.client: list[list[int]] = [[] for _ in range(self.COUNT)]
        self.ended: dict[int, Action] = {}
        self.error: Fail | None = None
        self.prefill: dict[int, str] = {}  # attempt → worker that is busy with it
        self.decode: dict[int, tuple[str, set[int]]] = {}  # attempt → worker, and choices it is busy with
        self.asked: list[ChooseRoute] = []
        self.waiting: dict[int, AwaitWorker] = {}  # choices for which there was no worker
        self.decode_ever: set[int] = set()  # attempts that were launched
        self.just_ended: set[int] = set()  # choices with a terminal message at this moment

    def feed(self, *events: Event) -> None:
        over = self.request.over
        actions: list[Action] = []
        for event in events:
            actions += self.request.handle(event, 1.0)
        for action in actions + self.request.settle():
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
                # A message of the same moment, after the one that ended the request, may be cancelled.
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

    @precondition(lambda self: self.request.choices[0].state is State.QUEUED)
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

    def terminal_message(self, attempt: int, choices: Iterable[int]) -> None:
        """Record terminal messages; a worker that was cancelled sends none."""
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
        self.terminal_message(attempt, choices)
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
        self.terminal_message(attempt, choices)
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
        self.feed(WorkerDown(worker, graceful=data.draw(st.booleans())))

    @rule(number=st.integers(1, 9), role=st.sampled_from("pd"), same_process=st.booleans())
    def worker_comes(self, number: int, role: str, same_process: bool) -> None:
        self.feed(WorkerUp(f"{role}{number}", same_process))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def no_worker_comes(self, data: st.DataObject) -> None:
        wait = self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))]
        self.feed(WaitExpired(wait.choice, wait.attempt))
        assert self.request.over

    @rule(data=st.data())
    def stop_string(self, data: st.DataObject) -> None:
        choice = data.draw(st.integers(0, self.COUNT - 1))
        if self.client[choice]:
            self.feed(StopMatched(data.draw(st.integers(1, len(self.client[choice]))), choice))

    @precondition(lambda self: len(self.decode_ever) > 2)
    @rule(
        event=st.sampled_from(
            [
                *(TimeLimitReached(), DeadlinePassed(), CancelRequested()),
                *(ShuttingDown(), ClientGone(), RequestFailed(Internal())),
            ]
        )
    )
    def interrupt(self, event: Event) -> None:
        self.feed(event)
        assert self.request.over

    @invariant()
    def each_client_has_a_beginning_of_its_text(self) -> None:
        for text, got in zip(self.texts, self.client, strict=True):
            assert tuple(got) == text[: len(got)]

    @invariant()
    def nothing_runs_after_the_end(self) -> None:
        if not self.request.over:
            return
        assert not self.prefill, "a prefill worker was left working"
        assert not any(choices for _, choices in self.decode.values()), "a decode worker was left working"
        if self.error is None and self.request.failed_in is None:
            assert len(self.ended) == self.COUNT

    @invariant()
    def two_deaths_keep_a_third_worker_away(self) -> None:
        context = self.request.choices[0].retry_context
        if context.deaths > 1:
            assert not any(choice.working for choice in self.request.choices)
        assert self.request.over or context.deaths - context.unconfirmed <= 1

    @invariant()
    def no_choice_is_forgotten(self) -> None:
        waiting = {choice for wanted in self.asked for choice in wanted.choices} | set(self.waiting)
        for choice in self.request.choices:
            if choice.state is State.ROUTING:
                assert choice.index in waiting
            if choice.state in (State.PREFILLING, State.DECODING):
                assert choice.index in self.decode[choice.attempt][1]

    @invariant()
    def unavailable_means_that_nothing_was_delivered(self) -> None:
        if self.error is not None and self.error.error.code.name == "UNAVAILABLE":
            assert not any(self.client)


TestChoicesMachine = ChoicesMachine.TestCase
TestChoicesMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_too_many_new_tokens_route_remotely_without_an_attempt_that_counts() -> None:
    request = RequestState(PROMPT, 8, 2, now=0.0)
    (question,) = moment(request, Admitted())
    assert isinstance(question, ChooseRoute)
    assert not question.remote
    (attach,) = moment(request, Routed(None, "d1", question.choices, LocalPrefill.SHORT))
    assert isinstance(attach, Attach)
    assert attach.attempt.local is LocalPrefill.SHORT
    refusals = [AttemptFailed(1, Role.DECODE, Cause.TOO_MANY_NEW, choice) for choice in (0, 1)]
    (question,) = moment(request, *refusals)
    assert isinstance(question, ChooseRoute)
    assert question.remote
    assert question.choices == (0, 1)
    assert not question.avoid
    attach, dispatch = moment(request, Routed("p1", "d1", question.choices))
    assert isinstance(attach, Attach)
    assert isinstance(dispatch, Dispatch)
    assert (attach.attempt.number, attach.attempt.local) == (2, LocalPrefill.NO)
    assert (request.refused, request.retries.total()) == (1, 0)
    assert all(choice.retry_context.attempts == 1 for choice in request.choices)
    assert all(choice.attempts == [2] for choice in request.choices)


def test_choice_may_be_local_again_after_a_remote_attempt() -> None:
    request = RequestState(PROMPT, 8, now=0.0)
    moment(request, Admitted())
    moment(request, Routed(None, "d1", (0,), LocalPrefill.SHORT))
    moment(request, AttemptFailed(1, Role.DECODE, Cause.TOO_MANY_NEW, 0))
    moment(request, Routed("p1", "d1", (0,)))
    actions = moment(request, AttemptFailed(2, Role.DECODE, Cause.PREEMPTED, 0))
    assert [action.remote for action in actions if isinstance(action, ChooseRoute)] == [False]
    moment(request, Routed(None, "d1", (0,), LocalPrefill.SHORT))
    assert request.retries == {Cause.PREEMPTED: 1}


def test_worker_that_dies_over_a_local_prompt_counts_as_a_death() -> None:
    request = RequestState(PROMPT, 8, now=0.0)
    moment(request, Admitted())
    moment(request, Routed(None, "d1", (0,), LocalPrefill.SHORT))
    moment(request, WorkerDown("d1"))
    assert request.limits.failed_workers.deaths == 1


def test_local_attempt_that_cannot_be_computed_avoids_its_decode_worker() -> None:
    request = RequestState(PROMPT, 8, now=0.0)
    moment(request, Admitted())
    moment(request, Routed(None, "d1", (0,), LocalPrefill.SHORT))
    (question,) = moment(request, AttemptFailed(1, Role.DECODE, Cause.COMPUTE_FAILED, 0))
    assert isinstance(question, ChooseRoute)
    assert question.avoid == {"d1"}
