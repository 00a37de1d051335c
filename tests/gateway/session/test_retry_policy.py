"""The retry policy: what is retried, where, how often, and at which cost to the budget. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.runtime.errors import DiptychError
from gateway.attempt.types import AttemptFailed, Cause, FinishReason, PrefillCommitted, Role, TokensArrived
from gateway.session.attempt_history import RequestLimits
from gateway.session.choice_state import ChoiceState
from gateway.session.events import (
    Action,
    Admitted,
    AwaitWorker,
    Cancel,
    Fail,
    Finish,
    Launched,
    NeedRoute,
    NoRoute,
    OutputRestored,
    WaitExpired,
    WorkerDown,
    WorkerUp,
)
from gateway.session.retry_policy import MAX_LOSSES, MAX_REFUSALS, WORKER_WAIT_S, RetryBudget
from gateway.session.states import State
from gateway.worker_pool.arrival_wait import FIRST_WAIT_S

PROMPT_TOKENS = 3


class Request:
    """A choice that the tests drive; workers of attempt k are pk and dk. Two seconds pass at each launch."""

    def __init__(self, max_tokens: int = 10, **limits: object) -> None:
        self.limits = RequestLimits(PROMPT_TOKENS, max_tokens, **limits)  # type: ignore[arg-type]
        self.choice = ChoiceState(self.limits, now=0.0)
        self.choice.handle(Admitted(), 0.0)
        self.attempts = 0
        self.now = 1.0

    def launch(self, prefill: str = "", decode: str = "") -> Request:
        self.attempts += 1
        names = prefill or f"p{self.attempts}", decode or f"d{self.attempts}"
        self.now += 2.0
        self.choice.handle(Launched(self.attempts, *names), self.now)
        return self

    def commit(self) -> Request:
        """Apply the end of the prefill: the decode worker begins."""
        self.choice.handle(PrefillCommitted(self.attempts), self.now)
        return self

    def token(self) -> None:
        have = len(self.choice.output_ids)
        self.choice.handle(TokensArrived(self.attempts, have, (have,)), 2.0)

    def first_token(self) -> None:
        """Apply the prefill worker's first token."""
        have = len(self.choice.output_ids)
        self.choice.handle(TokensArrived(self.attempts, have, (have,), early=True), 2.0)

    def worker_down(self, worker: str, *, graceful: bool = False, after_s: float = 0.5) -> list[Action]:
        return self.choice.handle(WorkerDown(worker, graceful), self.now + after_s)

    def fails(self, cause: Cause, role: Role = Role.DECODE, now: float = 3.0) -> list[Action]:
        return self.choice.handle(AttemptFailed(self.attempts, role, cause), now)


def error_of(actions: list[Action]) -> DiptychError:
    (failed,) = (action for action in actions if isinstance(action, Fail))
    return failed.error


@pytest.mark.parametrize("victim", ["p1", "d1"])
@pytest.mark.parametrize("tokens", [0, 2])
def test_lost_worker_is_retried_behind_the_delivered_tokens(victim: str, tokens: int) -> None:
    request = Request().launch()
    for _ in range(tokens):
        request.token()
    actions = request.worker_down(victim)
    other, role = ("d1", Role.DECODE) if victim == "p1" else ("p1", Role.PREFILL)
    assert actions == [Cancel(role, other, 1, (0,)), NeedRoute(0)]
    request.launch().token()
    assert request.choice.output_ids == list(range(tokens + 1))


def test_loss_of_a_prefill_worker_after_its_terminal_message_has_no_effect() -> None:
    request = Request().launch()
    request.choice.handle(AttemptFailed(1, Role.PREFILL, Cause.PREEMPTED), 2.0)
    request.launch()
    assert request.worker_down("p1") == []
    assert request.choice.state is State.PREFILLING


def test_second_death_suspends_the_request_until_both_are_confirmed() -> None:
    request = Request().launch().commit()
    request.worker_down("d1")
    request.launch().token()
    assert request.worker_down("p2") == [Cancel(Role.DECODE, "d2", 2, (0,)), AwaitWorker(0, 2, WORKER_WAIT_S)]
    assert request.choice.handle(WorkerUp("p2", same_process=False), 4.0) == []
    assert not request.choice.wants_route
    assert error_of(request.choice.handle(WorkerUp("d1", same_process=False), 5.0)).reason == "INTERNAL"


def test_returned_process_refutes_a_death() -> None:
    request = Request().launch().commit()
    request.worker_down("d1")
    request.launch().token()
    request.worker_down("p2")
    assert request.choice.handle(WorkerUp("d1", same_process=True), 4.0) == [NeedRoute(0)]
    assert request.choice.handle(NoRoute(Role.PREFILL), 4.0) == []  # the same wait goes on
    assert request.choice.handle(WorkerUp("p2", same_process=True), 5.0) == [NeedRoute(0)]
    request.launch().token()
    assert request.choice.output_ids == [0, 1]


@pytest.mark.parametrize("wait_s", [0.0, 5.0])
def test_quarantined_request_fails_when_its_wait_expires(wait_s: float) -> None:
    request = Request(wait_s=wait_s).launch().commit()
    request.worker_down("d1")
    request.launch()
    actions = request.worker_down("p2")
    if wait_s:
        actions = request.choice.handle(WaitExpired(0, 2), 8.0)
    assert error_of(actions).reason == "INTERNAL"


def test_two_deaths_under_one_worker_id_count_twice() -> None:
    request = Request().launch("p", "d").commit()
    request.worker_down("d")
    request.choice.handle(WorkerUp("d", same_process=False), 4.0)
    request.launch("p", "d").commit()
    assert request.worker_down("d")[-1] == AwaitWorker(0, 2, WORKER_WAIT_S)
    assert error_of(request.choice.handle(WorkerUp("d", same_process=False), 5.0)).reason == "INTERNAL"


def test_graceful_losses_are_no_deaths() -> None:
    request = Request(max_tokens=50).launch()
    for number in range(1, 20):
        assert request.worker_down(f"d{number}", graceful=True)[-1] == NeedRoute(0)
        request.launch().token()


def test_restored_link_is_no_death() -> None:
    request = Request().launch("p", "d")
    for _ in range(5):
        assert request.worker_down("d")[-1] == NeedRoute(0)
        request.choice.handle(WorkerUp("d", same_process=True), 4.0)
        request.launch("p", "d").token()
    assert request.choice.retry_context.deaths == 0


def test_suspected_peer_counts_as_dead_when_the_gateway_loses_it_too() -> None:
    request = Request().launch("p1", "d")
    assert request.fails(Cause.PEER_LOST, Role.DECODE)[-1] == NeedRoute(0)
    assert request.choice.history.avoid == {"p1"}
    request.launch("p2", "d")
    assert request.choice.retry_context.deaths == 0
    assert request.worker_down("p1") == []
    assert request.choice.retry_context.deaths == 1
    request.fails(Cause.PEER_LOST, Role.DECODE)
    request.launch("p3", "d")
    assert request.worker_down("p2")[-1] == AwaitWorker(0, 3, WORKER_WAIT_S)
    assert request.choice.state is State.ROUTING


@pytest.mark.parametrize("lost", ["by the gateway", "by its peer"])
def test_decode_worker_that_had_not_begun_does_not_count_as_death(lost: str) -> None:
    """Its prefill worker has not committed: it only kept memory for the request."""
    request = Request()
    for attempt in range(1, 4):
        request.launch()
        if lost == "by its peer":
            request.fails(Cause.PEER_LOST, Role.PREFILL)
        assert not any(isinstance(a, Fail | AwaitWorker) for a in request.worker_down(f"d{attempt}"))
    assert request.choice.retry_context.deaths == 0
    request.launch().token()
    assert request.choice.output_ids == [0]


def test_decode_worker_whose_prefill_worker_reports_late_counts_as_death() -> None:
    request = Request().launch()
    request.worker_down("d1")
    request.choice.handle(PrefillCommitted(1), request.now + 0.6)
    request.choice.handle(PrefillCommitted(1), request.now + 0.7)
    assert request.choice.retry_context.deaths == 1
    request.launch()
    request.worker_down("d2")
    late = request.choice.handle(PrefillCommitted(2), request.now + 0.6)
    assert late == [AwaitWorker(0, 2, WORKER_WAIT_S)]


@pytest.mark.parametrize(("gap_s", "deaths"), [(0.0, 1), (0.9, 1), (1.1, 0)])
def test_prefill_worker_that_dies_with_its_decode_worker_counts_as_death(gap_s: float, deaths: int) -> None:
    """The link to the decode worker, which had not begun, breaks first: the attempt has moved on by then."""
    request = Request().launch()
    assert request.worker_down("d1")[-1] == NeedRoute(0)
    request.choice.handle(WorkerDown("p1", graceful=False), request.now + 0.5 + gap_s)
    assert request.choice.retry_context.deaths == deaths


def test_request_under_which_two_pairs_die_gets_no_third() -> None:
    request = Request().launch()
    for attempt in (1, 2):
        died_at = request.now + 0.5
        request.worker_down(f"d{attempt}")
        actions = request.choice.handle(WorkerDown(f"p{attempt}", graceful=False), died_at + 0.2)
        if attempt == 1:
            assert not actions
            request.launch()
    assert actions == [AwaitWorker(0, 2, WORKER_WAIT_S)]
    request.choice.handle(WorkerUp("p1", same_process=False), request.now)
    error = error_of(request.choice.handle(WorkerUp("p2", same_process=False), request.now))
    assert error.reason == "INTERNAL"


def test_deaths_of_one_moment_count_once() -> None:
    limits = RequestLimits(PROMPT_TOKENS, 10)
    choices = [ChoiceState(limits, now=0.0, index=index) for index in range(2)]
    for index, choice in enumerate(choices):
        choice.handle(Admitted(), 0.0)
        choice.handle(Launched(1, f"p{index}", f"d{index}"), 1.0)
        choice.handle(TokensArrived(1, 0, (0,), index), 2.0)
    for index, at in ((0, 3.0), (1, 3.9)):
        for choice in choices:
            actions = choice.handle(WorkerDown(f"d{index}", graceful=False), at)
            assert not any(isinstance(a, Fail | AwaitWorker) for a in actions)
    assert choices[0].retry_context.deaths == 1
    assert all(choice.wants_route for choice in choices)


@pytest.mark.parametrize(("gap_s", "reason"), [(0.9, "WORKER_LOST"), (1.1, "INTERNAL")])
def test_deaths_that_chance_may_have_put_together_end_in_aborted(gap_s: float, reason: str) -> None:
    """The second worker had begun after the first death: the request may be the cause, or not."""
    request = Request(wait_s=0.0).launch().commit()
    request.token()
    died_at = request.now + 0.5
    request.worker_down("d1")
    request.now = died_at + 0.1 - 2.0
    request.launch().commit()
    error = error_of(request.worker_down("d2", after_s=died_at + gap_s - request.now))
    assert error.reason == reason
    assert error.metadata.get("tokens_emitted") == ("1" if reason == "WORKER_LOST" else None)


def test_two_quick_deaths_without_output_end_in_internal() -> None:
    """UNAVAILABLE would have clients send what may be a poison request to two more workers."""
    request = Request(wait_s=0.0).launch().commit()
    request.worker_down("d1", after_s=0.0)
    request.now -= 1.9
    request.launch().commit()
    assert error_of(request.worker_down("d2", after_s=0.1)).reason == "INTERNAL"


def test_loss_of_an_uninvolved_worker_has_no_effect() -> None:
    request = Request().launch()
    assert request.worker_down("d9") == []
    assert request.choice.retry_context.deaths == 0


def test_losses_without_progress_end_in_aborted_with_the_delivered_count() -> None:
    request = Request().launch("p", "d")
    request.token()
    for _ in range(MAX_LOSSES):
        assert request.fails(Cause.PEER_LOST)[-1] == NeedRoute(0)
        request.launch("p", "d")
    error = error_of(request.fails(Cause.PEER_LOST))
    assert (error.code.name, error.metadata) == ("ABORTED", {"tokens_emitted": "1"})


def test_refusals_with_progress_between_them_are_always_retried() -> None:
    request = Request(max_tokens=50).launch()
    for _ in range(4 * MAX_REFUSALS):
        request.token()
        assert request.fails(Cause.DRAINING)[-1] == NeedRoute(0)
        request.launch()


def test_replacement_process_is_no_longer_avoided() -> None:
    request = Request().launch("p", "d")
    request.fails(Cause.DRAINING)
    assert request.choice.history.avoid == {"d"}
    request.choice.handle(WorkerUp("d", same_process=True), 4.0)
    assert request.choice.history.avoid == {"d"}
    request.choice.handle(WorkerUp("d", same_process=False), 5.0)
    assert request.choice.history.avoid == set()


def test_failed_compute_is_retried_once_uncached_on_another_worker() -> None:
    request = Request().launch("p", "d")
    request.token()
    assert request.fails(Cause.COMPUTE_FAILED)[-1] == NeedRoute(0)
    assert request.choice.history.uncached
    assert request.choice.history.avoid == {"d"}
    assert request.choice.handle(NoRoute(Role.DECODE), 4.0) == [NeedRoute(0)]  # there is no other
    assert request.choice.history.avoid == set()
    request.launch("p", "d").token()
    assert error_of(request.fails(Cause.COMPUTE_FAILED)).reason == "INTERNAL"


def test_failed_handoff_avoids_both_workers() -> None:
    """A fault of either worker, or of the network between them, would be there the next time, too."""
    request = Request().launch("p", "d")
    assert request.fails(Cause.KV_TRANSFER_FAILED)[-1] == NeedRoute(0)
    assert request.choice.history.avoid == {"p", "d"}


@pytest.mark.parametrize(("alone", "avoided"), [(Role.PREFILL, "d"), (Role.DECODE, "p")])
def test_soft_avoid_is_cleared_for_the_only_worker_of_a_role_first(alone: Role, avoided: str) -> None:
    request = Request().launch("p", "d")
    request.fails(Cause.KV_TRANSFER_FAILED)
    assert request.choice.handle(NoRoute(alone), 4.0) == [NeedRoute(0)]
    assert request.choice.history.avoid == {avoided}
    assert request.choice.handle(NoRoute(alone), 4.0) == [NeedRoute(0)]  # nor does that fit
    assert request.choice.history.avoid == set()
    assert request.choice.handle(NoRoute(alone), 4.0) == [AwaitWorker(0, 1, WORKER_WAIT_S)]


def test_failed_compute_before_the_first_token_is_the_prefill_workers() -> None:
    """The decode worker learns of it from the prefill worker, and its report may arrive first."""
    request = Request().launch("p", "d")
    assert request.fails(Cause.COMPUTE_FAILED)[-1] == NeedRoute(0)
    assert request.choice.history.avoid == {"p"}


def test_loss_after_the_last_token_finishes_the_choice() -> None:
    request = Request(max_tokens=1).launch()
    request.token()
    assert request.worker_down("d1")[-1] == Finish(FinishReason.LENGTH)


def test_choice_without_a_worker_waits_for_one() -> None:
    request = Request().launch("p", "d")
    request.token()
    request.worker_down("d")
    assert request.choice.handle(NoRoute(Role.DECODE), 4.0) == [AwaitWorker(0, 1, WORKER_WAIT_S)]
    assert request.choice.handle(WorkerUp("p9"), 5.0) == [NeedRoute(0)]
    assert request.choice.handle(NoRoute(Role.DECODE), 5.0) == []  # it was not the one
    assert request.choice.handle(WorkerUp("d"), 6.0) == [NeedRoute(0)]
    request.launch("p", "d")
    assert request.choice.handle(WaitExpired(0, 1), 7.0) == []
    request.token()
    assert request.choice.output_ids == [0, 1]


@pytest.mark.parametrize(("tokens", "code"), [(0, "UNAVAILABLE"), (1, "ABORTED")])
def test_expired_wait_fails_by_what_was_delivered(tokens: int, code: str) -> None:
    request = Request().launch()
    for _ in range(tokens):
        request.token()
    request.worker_down("d1")
    request.choice.handle(NoRoute(Role.DECODE), 4.0)
    assert error_of(request.choice.handle(WaitExpired(0, 1), 5.0)).code.name == code


@pytest.mark.parametrize("attempts", [0, 1])
def test_choice_without_wait_time_fails_at_once(attempts: int) -> None:
    request = Request(wait_s=0.0)
    if attempts:
        request.launch().worker_down("d1")
    assert error_of(request.choice.handle(NoRoute(Role.DECODE), 4.0)).reason == "NO_READY_WORKER"


def test_choice_without_attempts_waits_briefly() -> None:
    request = Request(wait_s=60.0)
    assert request.choice.handle(NoRoute(Role.DECODE), 4.0) == [AwaitWorker(0, 0, FIRST_WAIT_S)]
    assert request.choice.handle(WorkerUp("d", same_process=True), 5.0) == [NeedRoute(0)]


def test_faults_are_charged_to_the_budget_and_preemptions_are_not() -> None:
    budget = RetryBudget(1)
    request = Request(budget=budget).launch()
    assert request.fails(Cause.PREEMPTED)[-1] == NeedRoute(0)
    request.launch()
    assert request.fails(Cause.DRAINING)[-1] == NeedRoute(0)
    request.launch()
    assert request.worker_down("d3")[-1] == NeedRoute(0)
    request.launch()
    error = error_of(request.fails(Cause.KV_TRANSFER_FAILED, now=8.5))
    assert (error.code.name, error.reason) == ("UNAVAILABLE", "WORKER_LOST")
    assert error.retry_after_s == pytest.approx(9.0)  # the first one was at 7.5 s, the window is 10 s
    assert budget.try_spend(7.5 + 10.0)


def test_restored_output_is_not_emitted_again() -> None:
    choice = ChoiceState(RequestLimits(PROMPT_TOKENS, 10), now=0.0)
    assert choice.handle(OutputRestored((4, 5)), 0.0) == []
    choice.handle(Admitted(), 1.0)
    choice.handle(Launched(1, "p", "d"), 2.0)
    assert choice.handle(TokensArrived(1, 1, (5, 6)), 3.0)[0].token_ids == (6,)  # type: ignore[union-attr]
    error = error_of(choice.handle(AttemptFailed(1, Role.DECODE, Cause.INCOMPATIBLE), 4.0))
    assert error.metadata == {"tokens_emitted": "1"}  # by this call


def test_complete_restored_output_finishes_at_once() -> None:
    choice = ChoiceState(RequestLimits(PROMPT_TOKENS, 2), now=0.0)
    assert choice.handle(OutputRestored((4, 5), reason=FinishReason.LENGTH), 0.0) == [
        Finish(FinishReason.LENGTH)
    ]
    assert choice.handle(Admitted(), 1.0) == []


# --- parts --------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.floats(0, 3, allow_nan=False), st.integers(0, 30), st.integers(1, 4)), max_size=60),
)
def test_retry_budget_bounds_the_retries_of_any_window(
    floor: int, steps: list[tuple[float, int, int]]
) -> None:
    budget = RetryBudget(floor, fraction=0.2, window_s=10.0)
    now = 0.0
    record_arrival: list[tuple[float, int]] = []
    repeated: list[float] = []
    for pause, new, asks in steps:
        now += pause
        budget.record_arrival(new, now)
        record_arrival.append((now, new))
        for _ in range(asks):
            came = sum(count for at, count in record_arrival if at > now - 10.0)
            again = sum(at > now - 9.5 for at in repeated)  # the window moves by half a second at a time
            if budget.try_spend(now):
                assert again < max(floor, 0.2 * came)
                repeated.append(now)
            else:
                assert 0.0 < budget.wait_s(now) <= 10.5


def test_retry_budget_wait_is_exact() -> None:
    budget = RetryBudget(3)
    for at in (0.2, 4.0, 4.1):
        assert budget.try_spend(at)
    assert not budget.try_spend(5.0)
    wait = budget.wait_s(5.0)
    assert not budget.try_spend(5.0 + wait - 0.01)
    assert budget.try_spend(5.0 + wait + 0.01)


def test_early_token_without_decode_is_no_progress() -> None:
    """Otherwise a handoff that never succeeds would be retried for each token of the output."""
    request = Request()
    for lost in range(MAX_LOSSES + 1):
        request.launch()
        request.first_token()
        actions = request.fails(Cause.PEER_LOST, Role.PREFILL)
        assert (actions[-1] == NeedRoute(0)) == (lost < MAX_LOSSES)
    assert error_of(actions).reason == "WORKER_LOST"


def test_early_token_followed_by_decode_is_progress() -> None:
    request = Request(max_tokens=50)
    for _ in range(3 * MAX_LOSSES):
        request.launch()
        request.first_token()
        have = len(request.choice.output_ids)
        request.choice.handle(TokensArrived(request.attempts, have - 1, (have - 1,)), 2.0)
        assert request.fails(Cause.PEER_LOST, Role.PREFILL)[-1] == NeedRoute(0)
