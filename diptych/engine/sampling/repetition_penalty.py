"""Logits processor of repetition_penalty (Keskar et al. 2019, as in transformers).

Tokens of prompt and output become less likely.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from diptych.engine.sampling.logits_processor import History, Scores


class RepetitionPenalty:
    """Divides positive logits of tokens in prompt and output, and multiplies negative ones."""

    def __init__(self, penalty: float) -> None:
        self._penalty = penalty
        self._prompt_ids: Sequence[int] = ()
        self._of_prompt: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def apply(self, scores: Scores, history: History) -> None:
        if history.prompt_ids is not self._prompt_ids:
            # A prompt stays what it is: a long one is read once, not at every step.
            self._prompt_ids = history.prompt_ids
            self._of_prompt = np.unique(np.asarray(history.prompt_ids, np.int64))
        # A token that is there twice is read and written twice with the same values.
        seen = np.concatenate([self._of_prompt, np.asarray(history.output_ids, np.int64)])
        values = scores[seen]
        scores[seen] = np.where(values < 0, values * self._penalty, values / self._penalty)
