"""Top-k of a long row without sorting it; log-probabilities, ranks and alternatives of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from diptych.engine.sampling.logits_processor import Scores
from diptych.engine.sampling.sample_row import TokenLogprob

_GROUP = 64
"""Entries a group: 49,152 logits make 768 groups."""


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprob]:
    """Return the log-probability of token_ids[i] under logits[i], with `count` alternatives each.

    `logits` is float32 `[at least len(token_ids), vocab]` on the CPU, and is not changed. Raises ValueError
    for logits that are not finite: there are no probabilities then.
    """
    rows: Scores = logits.detach().numpy()[: len(token_ids)]
    if not np.isfinite(rows).all():
        raise ValueError("the logits are not finite")
    return [row_logprobs(row, [token], count)[0] for row, token in zip(rows, token_ids, strict=True)]


def row_logprobs(logits: Scores, token_ids: Sequence[int], count: int) -> list[TokenLogprob]:
    """Return the log-probabilities of several tokens under one row of logits, with `count` alternatives each.

    `logits` is finite, `[vocab]`.
    """
    shift = log_sum_exp(logits)
    alternatives = topk(logits, count)
    top = tuple(zip(alternatives.tolist(), (logits[alternatives] - shift).tolist(), strict=True))
    return [
        TokenLogprob(float(logits[token] - shift), int(np.count_nonzero(logits > logits[token])) + 1, top)
        for token in token_ids
    ]


def top_logprobs(logits: Scores, count: int) -> list[tuple[int, float]]:
    """Return the `count` likeliest tokens of a row and their log-probabilities, likeliest first.

    Of equal tokens the lower id comes first. `logits` is float32 `[vocab]`, finite or minus infinity, and not
    changed. Fewer come where fewer are possible at all.
    """
    ids = topk(logits, count)
    return list(zip(ids.tolist(), (logits[ids] - log_sum_exp(logits)).tolist(), strict=True))


def log_sum_exp(logits: Scores) -> np.float32:
    """Return the log of the sum of exponentials of `logits [vocab]`, which makes logits log-probabilities."""
    highest = logits.max()
    total: np.float32 = highest + np.log(np.exp(logits - highest).sum())
    return total


def topk(row: Scores, count: int) -> npt.NDArray[np.int64]:
    """Return the indices of the `count` largest entries of a row, largest first, of equal ones the lower
    first.

    Minus infinity is no entry: fewer come where fewer are left.
    """
    if count <= 0:
        return np.empty(0, np.int64)
    places = topk_candidates(row, count)
    return places[np.argsort(-row[places], kind="stable")[:count]]


def topk_candidates(row: Scores, count: int) -> npt.NDArray[np.int64]:
    """Return the indices, in order, of the `count` largest entries of a row and some more: all above a bound.

    The bound is the `count`-th largest of the maxima of groups of entries: so many entries reach it at least,
    and hardly more. Minus infinity is no entry.
    """
    groups = len(row) // _GROUP
    if count > groups:
        bound = -np.inf if count >= len(row) else np.partition(row, -count)[-count]
    else:
        # Entries of a group lie far apart, so that all groups' maxima are found side by side.
        maxima = row[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
        bound = np.partition(maxima, -count)[-count]
    return np.flatnonzero(row >= bound if bound > -np.inf else row > -np.inf)
