"""Tokens that a tree of drafts has after a node."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.engine.sampling import Sampled, SampleRow, candidates, sample


def likely_children(logits: torch.Tensor, row: SampleRow, count: int) -> Sequence[int]:
    """Return up to `count` tokens after a node with `logits [1, vocab]`: the one that `row` draws, then the
    likeliest others.
    """
    (drawn,) = sample(logits, [row])
    found = [drawn.token_id] if isinstance(drawn, Sampled) else []
    if count > 1:
        (likely,) = candidates(logits, [row], count)
        if isinstance(likely, list):
            found += [one.token_id for one in likely if one.token_id not in found]
    return found[:count]
