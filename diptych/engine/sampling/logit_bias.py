"""Logits processor of the OpenAI API's logit_bias: a number added to the logits of chosen tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from diptych.engine.sampling.logits_processor import History, Scores


class LogitBias:
    """Makes tokens likelier or less likely."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._ids = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
        self._amounts = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))

    def apply(self, scores: Scores, history: History) -> None:
        scores[self._ids] += self._amounts
