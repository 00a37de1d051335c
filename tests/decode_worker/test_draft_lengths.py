"""Lengths of drafts: longer where tokens are right and rows are cheap, none where they do not pay."""

from __future__ import annotations

import pytest

from decode_worker.draft_lengths import PLAIN_EVERY, Acceptance, StepCosts, best_length


def costs(plain_s: float, row_s: float, draft_s: float = 0.0) -> StepCosts:
    """Return costs of steps that take `plain_s`, and `row_s` for each row more."""
    made = StepCosts()
    for rows in (1, 8):
        made.record_step(rows, plain_s + (rows - 1) * row_s, plain=rows == 1)
    made.record_draft("model", 4, 4 * draft_s)
    return made


@pytest.mark.parametrize(
    ("rate", "row_s", "draft_s", "length"),
    [
        (0.99, 0.0, 0.0, 7),  # free rows: as many as may be
        (0.0, 0.001, 0.0, 0),
        (0.5, 1.0, 0.0, 0),  # each row costs a whole step: bound by arithmetic
        (0.9, 0.01, 0.95, 0),  # a draft model as slow as the model
        (0.7, 0.0, 0.2, 3),
    ],
)
def test_length_is_the_one_with_most_tokens_a_second(
    rate: float, row_s: float, draft_s: float, length: int
) -> None:
    made = costs(1.0, row_s, draft_s)
    found, gain = best_length(rate, 7, made, "model", 1)
    assert found == length
    gains = {
        count: sum(rate**n for n in range(count + 1)) / (1 + count * row_s + count * draft_s)
        for count in range(8)
    }
    assert gain == pytest.approx(max(gains.values()))


def test_costs_between_and_beyond_known_sizes() -> None:
    made = costs(1.0, 0.1)
    assert made.cost("lookup", 1, 3) == pytest.approx(1.3)
    assert made.cost("lookup", 4, 3) == pytest.approx(1.7 / 1.3)
    assert StepCosts().cost("lookup", 1, 3) == 1.0


def test_plain_steps_are_timed_now_and_then() -> None:
    made = StepCosts()
    assert made.wants_plain
    made.record_step(1, 0.01, plain=True)
    for _ in range(PLAIN_EVERY):
        assert not made.wants_plain
        made.record_step(4, 0.01, plain=False)
    assert made.wants_plain


def test_acceptance_follows_what_came() -> None:
    right, wrong = Acceptance(), Acceptance()
    for _ in range(20):
        right.record(4, 4)
        wrong.record(4, 0)
    assert right.rate > 0.95
    assert wrong.rate < 0.05
    for _ in range(20):
        right.record(4, 1)  # the first of four is right, the second is not
    assert right.rate == pytest.approx(0.5, abs=0.1)
