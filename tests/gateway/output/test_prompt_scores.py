"""Scores of a prompt in the order in which they come, from one attempt or several."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.attempt.types import TokenLogprob
from gateway.output.prompt_scores import PromptScores

SCORES = [TokenLogprob(-float(i), i) for i in range(1, 10)]  # of positions 1 to 9


@given(cuts=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=8))
def test_repeats_are_dropped_and_the_whole_is_in_order(cuts: list[tuple[int, int]]) -> None:
    scores = PromptScores(10)
    for first, last in cuts:
        have = len(scores.scores)
        assert scores.add(first, SCORES[first - 1 : last]) is (first <= have + 1)
    assert scores.scores == SCORES[: len(scores.scores)]
    scores.add(1, SCORES)
    assert scores.complete
    assert scores.scores == SCORES


def test_more_than_the_prompt_has_is_refused() -> None:
    assert not PromptScores(3).add(1, SCORES[:3])


def test_what_nobody_asked_for_is_complete() -> None:
    assert PromptScores(0).complete
    assert PromptScores(1).complete  # of a prompt's first token there is no score
