"""Logits processor of the OpenAI API's presence_penalty and frequency_penalty.

Tokens of the output become less likely, by a fixed amount and by one for each time they came.
"""

from __future__ import annotations

import numpy as np

from diptych.engine.sampling.logits_processor import History, Scores


class FrequencyPresence:
    """Subtracts from the logits of the output's tokens; the prompt does not count."""

    def __init__(self, frequency: float, presence: float) -> None:
        self._frequency = frequency
        self._presence = presence

    def apply(self, scores: Scores, history: History) -> None:
        if not history.output_ids:
            return
        ids, counts = np.unique(np.asarray(history.output_ids, np.int64), return_counts=True)
        scores[ids] -= self._frequency * counts + self._presence
