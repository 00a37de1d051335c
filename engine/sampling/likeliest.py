"""The few largest entries of a long row, without sorting it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.sampling.rule import Scores

_GROUP = 64
"""Entries a group. 49,152 logits make 768 groups, of whose maxima a partition is quick."""


def likeliest(logits: Scores, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens of a row and their log-probabilities, likeliest first; of equal ones the
    lower id first.

    `logits` is float32 `[vocab]`, finite or minus infinity, and not changed. Fewer come where fewer are
    possible at all.
    """
    ids = largest(logits, count)
    return list(zip(ids.tolist(), (logits[ids] - log_total(logits)).tolist(), strict=True))


def log_total(logits: Scores) -> np.float32:
    """What to subtract from the logits of a row to have log-probabilities."""
    highest = logits.max()
    total: np.float32 = highest + np.log(np.exp(logits - highest).sum())
    return total


def largest(row: Scores, count: int) -> npt.NDArray[np.int64]:
    """Indices of the `count` largest entries of a row, largest first, of equal ones the lower index first.

    Minus infinity is no entry: fewer come where fewer are left.
    """
    if count <= 0:
        return np.empty(0, np.int64)
    bound = _at_most_the_smallest_of(row, count)
    places = np.flatnonzero(row >= bound if bound > -np.inf else row > -np.inf)
    return places[np.argsort(-row[places], kind="stable")[:count]]


def _at_most_the_smallest_of(row: Scores, count: int) -> np.float32:
    """A bound that the `count` largest entries reach, and few others do.

    `count` groups have a maximum of at least the bound, so at least so many entries have.
    """
    groups = len(row) // _GROUP
    if count > groups:
        return np.float32(-np.inf) if count >= len(row) else np.partition(row, -count)[-count]
    maxima = row[: groups * _GROUP].reshape(groups, _GROUP).max(axis=-1)
    bound: np.float32 = np.partition(maxima, -count)[-count]
    return bound
