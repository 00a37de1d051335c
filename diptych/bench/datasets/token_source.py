"""Random token ids, ordinary ones of nearly any vocabulary unless another range is given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MOST_TOKENS = 1 << 31  # of any vocabulary: protocols carry ids in 32 bits, some of them signed


@dataclass(frozen=True)
class TokenSource:
    """Draws from `lowest` up to and including `highest`. Small ids are control tokens in many models."""

    lowest: int = 100
    highest: int = 40_000

    def draw(self, count: int, *key: int) -> tuple[int, ...]:
        """`count` ids that depend on the key alone: non-negative numbers, say a seed and a position."""
        rng = np.random.default_rng(key)
        return tuple(rng.integers(self.lowest, self.highest, size=count, endpoint=True).tolist())


ANY_TOKENS = TokenSource()
