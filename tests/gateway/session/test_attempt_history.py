"""The failed workers of a request, against brute force."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.session.attempt_history import FailedWorkers


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["lost", "graceful", "back", "new"]))))
def test_deaths_are_losses_that_were_neither_graceful_nor_refuted(story: list[tuple[str, str]]) -> None:
    """Compare with brute force: each loss counts from its moment until it is refuted."""
    failed = FailedWorkers()
    open_losses: dict[str, bool] = {}
    final = 0
    for worker, what in story:
        if what in ("lost", "graceful"):
            failed.worker_down(worker, graceful=what == "graceful")
            open_losses[worker] = open_losses.get(worker, False) or what == "lost"
        else:
            failed.worker_up(worker, same_process=what == "back")
            final += open_losses.pop(worker, False) and what == "new"
    assert failed.deaths == final + sum(open_losses.values())
