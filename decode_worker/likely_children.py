"""Tokens that a tree of drafts has after a node."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from diptych.engine.sampling import Candidate, Sampled, SampleRow, candidates, sample


def likely_children(logits: torch.Tensor, row: SampleRow, count: int) -> Sequence[int]:
    """Return up to `count` tokens after a node with `logits [1, vocab]`: the one that `row` draws, then the
    likeliest others.
    """
    (drawn,) = sample(logits, [row])
    found = [drawn.token_id] if isinstance(drawn, Sampled) else []
    if count > 1:
        found += [one.token_id for one in _likely(logits, row, count) if one.token_id not in found]
    return found[:count]


def scored_children(logits: torch.Tensor, row: SampleRow, count: int) -> Sequence[tuple[int, float]]:
    """Return the same with log-probabilities.

    The drawn token has that of the likeliest, whichever it is: the model draws with the same random numbers.
    Where the rules allow fewer tokens than `count`, one of these comes for certain.
    """
    likely = _likely(logits, row, count)
    if not likely:
        return []
    logprobs = {one.token_id: one.logprob for one in likely}
    missing = math.log(sum(map(math.exp, logprobs.values()))) if len(likely) < count else 0.0
    children = likely_children(logits, row, count)
    first = likely[0].logprob
    return [
        (token_id, (first if place == 0 else logprobs.get(token_id, first)) - missing)
        for place, token_id in enumerate(children)
    ]


def _likely(logits: torch.Tensor, row: SampleRow, count: int) -> Sequence[Candidate]:
    (likely,) = candidates(logits, [row], count)
    return likely if isinstance(likely, list) else []
