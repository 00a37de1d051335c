"""The few largest entries of a long row, without sorting it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from diptych.engine.sampling.logits_processor import Scores

_GROUP = 64
"""Entries a group: 49,152 logits make 768 groups."""


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
    places = reaching(row, count)
    return places[np.argsort(-row[places], kind="stable")[:count]]


def reaching(row: Scores, count: int) -> npt.NDArray[np.int64]:
    """Indices, in order, of the `count` largest entries of a row and of some more: all those above a bound.

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
