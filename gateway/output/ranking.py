"""Which of several finished outputs a client gets: ``best_of``."""

from __future__ import annotations

from collections.abc import Sequence


def best(logprobs: Sequence[float], count: int) -> list[int]:
    """Indexes of the ``count`` likeliest, likeliest first; of equals the one that was numbered first.

    Args:
        logprobs: of each whole output, the sum over its tokens.
    """
    return sorted(range(len(logprobs)), key=lambda index: -logprobs[index])[:count]
