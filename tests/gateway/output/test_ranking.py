"""``best_of``: the likeliest come first, and of equals the first."""

from __future__ import annotations

from gateway.output.ranking import best


def test_likeliest_first_and_equals_in_their_own_order() -> None:
    assert best([-3.0, -1.0, -2.0, -1.0], 3) == [1, 3, 2]
    assert best([-3.0, -1.0], 2) == [1, 0]
