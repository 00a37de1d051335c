"""Rule: tokens that are there already become less likely (Keskar et al. 2019, as in transformers)."""

from __future__ import annotations

import numpy as np

from engine.sampling.rule import History, Scores


class RepetitionPenalty:
    """Divides positive logits of tokens in prompt and output, and multiplies negative ones."""

    def __init__(self, penalty: float) -> None:
        self._penalty = penalty

    def apply(self, scores: Scores, history: History) -> None:
        # A token that is there twice is read and written twice with the same values.
        seen = np.concatenate([np.asarray(ids, np.int64) for ids in (history.prompt_ids, history.output_ids)])
        values = scores[seen]
        scores[seen] = np.where(values < 0, values * self._penalty, values / self._penalty)
