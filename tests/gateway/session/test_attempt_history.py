"""The failed workers of a request, against brute force."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.session.attempt_history import FailedWorkers
from gateway.session.retry_policy import MOMENT_S


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["lost", "graceful", "back", "new"]))))
def test_deaths_are_losses_that_were_neither_graceful_nor_refuted(story: list[tuple[str, str]]) -> None:
    """Compare with brute force: each loss counts from its moment until it is refuted."""
    failed = FailedWorkers()
    open_losses: dict[str, bool] = {}
    final = 0
    for at, (worker, what) in enumerate(story):
        if what in ("lost", "graceful"):
            failed.worker_down(worker, graceful=what == "graceful", at=2.0 * at)
            open_losses[worker] = open_losses.get(worker, False) or what == "lost"
        else:
            failed.worker_up(worker, same_process=what == "back")
            final += open_losses.pop(worker, False) and what == "new"
    assert failed.deaths == final + sum(open_losses.values())
    assert failed.unconfirmed == sum(open_losses.values())


@given(st.lists(st.tuples(st.floats(0, 0.6), st.floats(0, 3)), max_size=6))
def test_deaths_in_a_moment_count_once_if_the_workers_had_the_request_before(
    gaps: list[tuple[float, float]],
) -> None:
    """Compare with brute force: a moment begins with a death, and takes in those of a second."""
    failed = FailedWorkers()
    at, first_at, count = 10.0, -100.0, 0
    for number, (gap, had_for) in enumerate(gaps):
        at += gap
        failed.worker_down(f"w{number}", graceful=False, at=at, since=at - had_for)
        if not (at - had_for < first_at and at - first_at <= MOMENT_S):
            first_at, count = at, count + 1
    assert failed.deaths == count


def test_death_counts_from_when_a_peer_noticed_it() -> None:
    """The attempt after it began before this gateway's own link broke: its death is another one."""
    failed = FailedWorkers()
    failed.suspect("p0", since=0.0, at=1.0)
    failed.worker_down("p1", graceful=False, at=1.1, since=1.01)
    failed.worker_down("p0", graceful=False, at=1.2)
    assert failed.deaths == 2


def test_suspect_for_a_moment_is_one_no_longer_unless_a_peer_noticed_it_too() -> None:
    failed = FailedWorkers()
    failed.suspect("p", since=0.0, at=1.0, within_s=1.0)
    assert failed.is_suspect("p", 2.0)
    assert not failed.is_suspect("p", 2.1)
    failed.suspect("p", since=3.0, at=4.0)
    failed.suspect("p", since=5.0, at=6.0, within_s=1.0)
    assert failed.is_suspect("p", 100.0)
    failed.worker_down("p", graceful=False, at=100.0)
    assert failed.deaths == 1


def test_suspects_matter_once_one_more_death_would_be_too_many() -> None:
    failed = FailedWorkers()
    failed.suspect("p", since=1.0, at=2.0)
    assert failed.suspects == ()
    failed.worker_down("d", graceful=False, at=4.0, since=3.0)
    assert failed.suspects == (("p", 2.0),)
    failed.worker_down("p", graceful=False, at=5.0)
    assert (failed.deaths, failed.suspects) == (2, ())
