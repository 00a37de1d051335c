"""Logits processor of allowed_token_ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diptych.engine.sampling.logits_processor import History, Scores


class AllowedTokens:
    """Forbids every token but the given ones."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = np.asarray(token_ids, dtype=np.int64)

    def apply(self, scores: Scores, history: History) -> None:
        kept = scores[self._ids]
        scores.fill(-np.inf)
        scores[self._ids] = kept
