"""The rules of recovery: what is tried again, where, how often, and what it costs. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.runtime.errors import DiptychError
from gateway.attempt.types import Cause, FinishReason, Role
from gateway.attempt.worker_events import AttemptFailed, TokensArrived
from gateway.session.choice_state import ChoiceState
from gateway.session.failed_workers import FailedWorkers
from gateway.session.request_limits import RequestLimits
from gateway.session.retry_budget import RetryBudget
from gateway.session.retry_policy import LOSSES_RECOVERED, REFUSALS_REROUTED, WAIT_FOR_WORKER_S
from gateway.session.session_actions import Action, AwaitWorker, Cancel, Fail, Finish, NeedRoute
from gateway.session.session_events import (
    Admitted,
    Launched,
    NoRoute,
    Restored,
    WaitOver,
    WorkerGone,
    WorkerUp,
)
from gateway.session.transitions import State

PROMPT_TOKENS = 3


class Request:
    """One choice that is driven by hand; workers of attempt k are pk and dk."""

    def __init__(self, max_tokens: int = 10, **limits: object) -> None:
        self.tally = RequestLimits(PROMPT_TOKENS, max_tokens, **limits)  # type: ignore[arg-type]
        self.session = ChoiceState(self.tally, now=0.0)
        self.session.handle(Admitted(), 0.0)
        self.attempts = 0

    def launch(self, prefill: str = "", decode: str = "") -> Request:
        self.attempts += 1
        names = prefill or f"p{self.attempts}", decode or f"d{self.attempts}"
        self.session.handle(Launched(self.attempts, *names), 1.0)
        return self

    def token(self) -> None:
        have = len(self.session.output_ids)
        self.session.handle(TokensArrived(self.attempts, have, (have,)), 2.0)

    def first_token(self) -> None:
        """The prefill worker says it."""
        have = len(self.session.output_ids)
        self.session.handle(TokensArrived(self.attempts, have, (have,), early=True), 2.0)

    def gone(self, worker: str, *, left: bool = False, now: float = 3.0) -> list[Action]:
        return self.session.handle(WorkerGone(worker, left), now)

    def fails(self, cause: Cause, role: Role = Role.DECODE, now: float = 3.0) -> list[Action]:
        return self.session.handle(AttemptFailed(self.attempts, role, cause), now)


def error_of(actions: list[Action]) -> DiptychError:
    (failed,) = (action for action in actions if isinstance(action, Fail))
    return failed.error


@pytest.mark.parametrize("victim", ["p1", "d1"])
@pytest.mark.parametrize("tokens", [0, 2])
def test_a_lost_worker_is_made_up_for(victim: str, tokens: int) -> None:
    request = Request().launch()
    for _ in range(tokens):
        request.token()
    actions = request.gone(victim)
    other, role = ("d1", Role.DECODE) if victim == "p1" else ("p1", Role.PREFILL)
    assert actions == [Cancel(role, other, 1, (0,)), NeedRoute(0)]
    request.launch().token()
    assert request.session.output_ids == list(range(tokens + 1))


def test_a_prefill_worker_that_has_had_its_last_word_is_not_missed() -> None:
    request = Request().launch()
    request.session.handle(AttemptFailed(1, Role.PREFILL, Cause.PREEMPTED), 2.0)
    request.launch()
    assert request.gone("p1") == []
    assert request.session.state is State.PREFILLING


def test_the_second_worker_that_dies_under_a_request_is_the_last() -> None:
    request = Request().launch()
    request.gone("d1")
    request.launch().token()
    assert request.gone("p2") == [Cancel(Role.DECODE, "d2", 2, (0,)), AwaitWorker(0, 2, WAIT_FOR_WORKER_S)]
    assert request.session.handle(WorkerUp("p2", returned=False), 4.0) == []
    assert not request.session.wants_route
    assert error_of(request.session.handle(WorkerUp("d1", returned=False), 5.0)).reason == "INTERNAL"


def test_whoever_is_back_was_not_killed() -> None:
    request = Request().launch()
    request.gone("d1")
    request.launch().token()
    request.gone("p2")
    assert request.session.handle(WorkerUp("d1", returned=True), 4.0) == [NeedRoute(0)]
    assert request.session.handle(NoRoute(Role.PREFILL), 4.0) == []  # the same wait goes on
    assert request.session.handle(WorkerUp("p2", returned=True), 5.0) == [NeedRoute(0)]
    request.launch().token()
    assert request.session.output_ids == [0, 1]


@pytest.mark.parametrize("wait_s", [0.0, 5.0])
def test_who_is_not_acquitted_in_time_is_guilty(wait_s: float) -> None:
    request = Request(wait_s=wait_s).launch()
    request.gone("d1")
    request.launch()
    actions = request.gone("p2")
    if wait_s:
        actions = request.session.handle(WaitOver(0, 2), 8.0)
    assert error_of(actions).reason == "INTERNAL"


def test_a_worker_that_dies_twice_under_its_name_has_died_twice() -> None:
    request = Request().launch("p", "d")
    request.gone("d")
    request.session.handle(WorkerUp("d", returned=False), 4.0)
    request.launch("p", "d")
    assert request.gone("d")[-1] == AwaitWorker(0, 2, WAIT_FOR_WORKER_S)
    assert error_of(request.session.handle(WorkerUp("d", returned=False), 5.0)).reason == "INTERNAL"


def test_workers_that_said_they_would_go_have_not_died() -> None:
    request = Request(max_tokens=50).launch()
    for number in range(1, 20):
        assert request.gone(f"d{number}", left=True)[-1] == NeedRoute(0)
        request.launch().token()


def test_a_link_that_comes_back_was_no_death() -> None:
    request = Request().launch("p", "d")
    for _ in range(5):
        assert request.gone("d")[-1] == NeedRoute(0)
        request.session.handle(WorkerUp("d", returned=True), 4.0)
        request.launch("p", "d").token()
    assert request.session.history.deaths == 0


def test_a_peer_that_another_worker_lost_counts_when_the_gateway_loses_it_too() -> None:
    request = Request().launch("p", "d1")
    assert request.fails(Cause.PEER_LOST, Role.PREFILL)[-1] == NeedRoute(0)
    assert request.session.setbacks.avoid == {"d1"}
    request.launch("p", "d2")
    assert request.session.history.deaths == 0
    assert request.gone("d1") == []
    assert request.session.history.deaths == 1
    request.fails(Cause.PEER_LOST, Role.PREFILL)
    request.launch("p", "d3")
    assert request.gone("d2")[-1] == AwaitWorker(0, 3, WAIT_FOR_WORKER_S)
    assert request.session.state is State.ROUTING


def test_a_stranger_that_dies_is_none_of_its_business() -> None:
    request = Request().launch()
    assert request.gone("d9") == []
    assert request.session.history.deaths == 0


def test_who_makes_no_progress_gives_up_and_says_what_the_client_has() -> None:
    request = Request().launch("p", "d")
    request.token()
    for _ in range(LOSSES_RECOVERED):
        assert request.fails(Cause.PEER_LOST)[-1] == NeedRoute(0)
        request.launch("p", "d")
    error = error_of(request.fails(Cause.PEER_LOST))
    assert (error.code.name, error.metadata) == ("ABORTED", {"tokens_emitted": "1"})


def test_a_request_that_gets_on_may_be_moved_as_often_as_operators_like() -> None:
    request = Request(max_tokens=50).launch()
    for _ in range(4 * REFUSALS_REROUTED):
        request.token()
        assert request.fails(Cause.DRAINING)[-1] == NeedRoute(0)
        request.launch()


def test_a_restarted_worker_has_refused_nothing_yet() -> None:
    request = Request().launch("p", "d")
    request.fails(Cause.DRAINING)
    assert request.session.setbacks.avoid == {"d"}
    request.session.handle(WorkerUp("d", returned=True), 4.0)
    assert request.session.setbacks.avoid == {"d"}
    request.session.handle(WorkerUp("d", returned=False), 5.0)
    assert request.session.setbacks.avoid == set()


def test_a_row_that_failed_is_computed_anew_elsewhere_and_only_once() -> None:
    request = Request().launch("p", "d")
    request.token()
    assert request.fails(Cause.COMPUTE_FAILED)[-1] == NeedRoute(0)
    assert request.session.setbacks.uncached
    assert request.session.setbacks.avoid == {"d"}
    assert request.session.handle(NoRoute(Role.DECODE), 4.0) == [NeedRoute(0)]  # there is no other
    assert request.session.setbacks.avoid == set()
    request.launch("p", "d").token()
    assert error_of(request.fails(Cause.COMPUTE_FAILED)).reason == "INTERNAL"


def test_a_handoff_that_failed_is_tried_again_by_another_pair() -> None:
    """What is wrong with the way between two workers, or with one of them, is wrong the next time, too."""
    request = Request().launch("p", "d")
    assert request.fails(Cause.KV_TRANSFER_FAILED)[-1] == NeedRoute(0)
    assert request.session.setbacks.avoid == {"p", "d"}


@pytest.mark.parametrize(("alone", "left"), [(Role.PREFILL, "d"), (Role.DECODE, "p")])
def test_a_worker_that_is_alone_in_its_role_is_tried_with_another_one(alone: Role, left: str) -> None:
    request = Request().launch("p", "d")
    request.fails(Cause.KV_TRANSFER_FAILED)
    assert request.session.handle(NoRoute(alone), 4.0) == [NeedRoute(0)]
    assert request.session.setbacks.avoid == {left}
    assert request.session.handle(NoRoute(alone), 4.0) == [NeedRoute(0)]  # nor does that fit
    assert request.session.setbacks.avoid == set()
    assert request.session.handle(NoRoute(alone), 4.0) == [AwaitWorker(0, 1, WAIT_FOR_WORKER_S)]


def test_before_the_first_token_a_failed_row_is_the_prefill_workers_whoever_says_so() -> None:
    """A decode worker that hears of it from the prefill worker may be the first to tell the gateway."""
    request = Request().launch("p", "d")
    assert request.fails(Cause.COMPUTE_FAILED)[-1] == NeedRoute(0)
    assert request.session.setbacks.avoid == {"p"}


def test_the_last_token_is_the_end_whoever_dies_after_it() -> None:
    request = Request(max_tokens=1).launch()
    request.token()
    assert request.gone("d1")[-1] == Finish(FinishReason.LENGTH)


def test_who_has_no_worker_waits_for_one() -> None:
    request = Request().launch("p", "d")
    request.token()
    request.gone("d")
    assert request.session.handle(NoRoute(Role.DECODE), 4.0) == [AwaitWorker(0, 1, WAIT_FOR_WORKER_S)]
    assert request.session.handle(WorkerUp("p9"), 5.0) == [NeedRoute(0)]
    assert request.session.handle(NoRoute(Role.DECODE), 5.0) == []  # it was not the one
    assert request.session.handle(WorkerUp("d"), 6.0) == [NeedRoute(0)]
    request.launch("p", "d")
    assert request.session.handle(WaitOver(0, 1), 7.0) == []
    request.token()
    assert request.session.output_ids == [0, 1]


@pytest.mark.parametrize(("tokens", "code"), [(0, "UNAVAILABLE"), (1, "ABORTED")])
def test_nobody_comes(tokens: int, code: str) -> None:
    request = Request().launch()
    for _ in range(tokens):
        request.token()
    request.gone("d1")
    request.session.handle(NoRoute(Role.DECODE), 4.0)
    assert error_of(request.session.handle(WaitOver(0, 1), 5.0)).code.name == code


@pytest.mark.parametrize("limits", [{}, {"wait_s": 0.0}])
def test_nobody_waits_who_never_had_a_worker_or_may_not(limits: dict[str, float]) -> None:
    request = Request(**limits)
    if limits:
        request.launch().gone("d1")
    assert error_of(request.session.handle(NoRoute(Role.DECODE), 4.0)).reason == "NO_READY_WORKER"


def test_faults_are_paid_from_the_budget_and_preemptions_are_not() -> None:
    budget = RetryBudget(1)
    request = Request(budget=budget).launch()
    assert request.fails(Cause.PREEMPTED)[-1] == NeedRoute(0)
    request.launch()
    assert request.fails(Cause.DRAINING)[-1] == NeedRoute(0)
    request.launch()
    assert request.gone("d3")[-1] == NeedRoute(0)
    request.launch()
    error = error_of(request.fails(Cause.KV_TRANSFER_FAILED, now=4.0))
    assert (error.code.name, error.reason) == ("UNAVAILABLE", "WORKER_LOST")
    assert error.retry_after_s == pytest.approx(9.0)  # the first one was at 3 s, the window is 10 s
    assert budget.spend(3.0 + 10.0)


def test_what_the_client_has_is_not_made_again() -> None:
    session = ChoiceState(RequestLimits(PROMPT_TOKENS, 10), now=0.0)
    assert session.handle(Restored((4, 5)), 0.0) == []
    session.handle(Admitted(), 1.0)
    session.handle(Launched(1, "p", "d"), 2.0)
    assert session.handle(TokensArrived(1, 1, (5, 6)), 3.0)[0].token_ids == (6,)  # type: ignore[union-attr]
    error = error_of(session.handle(AttemptFailed(1, Role.DECODE, Cause.INCOMPATIBLE), 4.0))
    assert error.metadata == {"tokens_emitted": "1"}  # by this call


def test_a_complete_output_needs_no_worker() -> None:
    session = ChoiceState(RequestLimits(PROMPT_TOKENS, 2), now=0.0)
    assert session.handle(Restored((4, 5), reason=FinishReason.LENGTH), 0.0) == [Finish(FinishReason.LENGTH)]
    assert session.handle(Admitted(), 1.0) == []


# --- the parts --------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["lost", "left", "back", "new"]))))
def test_deaths_are_losses_without_a_farewell_or_a_return(story: list[tuple[str, str]]) -> None:
    """Told again by brute force: each loss counts from the moment it happens until it is explained."""
    casualties = FailedWorkers()
    open_losses: dict[str, bool] = {}
    final = 0
    for worker, what in story:
        if what in ("lost", "left"):
            casualties.gone(worker, left=what == "left")
            open_losses[worker] = open_losses.get(worker, False) or what == "lost"
        else:
            casualties.up(worker, returned=what == "back")
            final += open_losses.pop(worker, False) and what == "new"
    assert casualties.deaths == final + sum(open_losses.values())


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.floats(0, 3, allow_nan=False), st.integers(0, 30), st.integers(1, 4)), max_size=60),
)
def test_within_any_window_no_more_is_repeated_than_allowed(
    floor: int, steps: list[tuple[float, int, int]]
) -> None:
    budget = RetryBudget(floor, fraction=0.2, window_s=10.0)
    now = 0.0
    arrived: list[tuple[float, int]] = []
    repeated: list[float] = []
    for pause, new, asks in steps:
        now += pause
        budget.arrived(new, now)
        arrived.append((now, new))
        for _ in range(asks):
            came = sum(count for at, count in arrived if at > now - 10.0)
            again = sum(at > now - 9.5 for at in repeated)  # the window moves by half a second at a time
            if budget.spend(now):
                assert again < max(floor, 0.2 * came)
                repeated.append(now)
            else:
                assert 0.0 < budget.wait_s(now) <= 10.5


def test_the_hint_of_the_budget_is_true() -> None:
    budget = RetryBudget(3)
    for at in (0.2, 4.0, 4.1):
        assert budget.spend(at)
    assert not budget.spend(5.0)
    wait = budget.wait_s(5.0)
    assert not budget.spend(5.0 + wait - 0.01)
    assert budget.spend(5.0 + wait + 0.01)


def test_a_token_that_no_decode_worker_took_over_is_no_progress() -> None:
    """Else a handoff that never succeeds would be tried again for each token of the output."""
    request = Request()
    for lost in range(LOSSES_RECOVERED + 1):
        request.launch()
        request.first_token()
        actions = request.fails(Cause.PEER_LOST, Role.PREFILL)
        assert (actions[-1] == NeedRoute(0)) == (lost < LOSSES_RECOVERED)
    assert error_of(actions).reason == "WORKER_LOST"


def test_one_that_was_taken_over_is() -> None:
    request = Request(max_tokens=50)
    for _ in range(3 * LOSSES_RECOVERED):
        request.launch()
        request.first_token()
        have = len(request.session.output_ids)
        request.session.handle(TokensArrived(request.attempts, have - 1, (have - 1,)), 2.0)
        assert request.fails(Cause.PEER_LOST, Role.PREFILL)[-1] == NeedRoute(0)
