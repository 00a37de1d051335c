"""Scores of a prompt's tokens as they come from the prefill worker, in order and once."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.attempt.types import TokenLogprob


class PromptScores:
    """Those of one request; ``prompt_tokens`` is 0 where none were asked for."""

    def __init__(self, prompt_tokens: int) -> None:
        self._expected = max(prompt_tokens - 1, 0)  # nothing comes before the first token to judge it by
        self.scores: list[TokenLogprob] = []  # of the tokens from position 1 on

    @property
    def complete(self) -> bool:
        return len(self.scores) >= self._expected

    def add(self, first: int, scores: Sequence[TokenLogprob]) -> bool:
        """Scores from position ``first`` on. A later attempt repeats them; what is there already is dropped.

        False: some are missing before these, or there are more than the prompt has tokens.
        """
        known = len(self.scores) + 1 - first
        if known < 0 or first < 1:
            return False
        self.scores += scores[known:]
        return len(self.scores) <= self._expected
