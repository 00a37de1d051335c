"""The random numbers of sampling, and the distribution they are applied to."""

from __future__ import annotations

import hashlib
import math
import struct
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from diptych.engine.sampling.logits_processor import Scores
from diptych.engine.sampling.sample_row import SampleRow, SamplingParams
from diptych.engine.sampling.topk import topk_candidates

Weights = npt.NDArray[np.float64]
_64_BITS = 0xFFFFFFFFFFFFFFFF
_ROWS = 64
"""Rows of the table in which a long list of weights is summed."""
_FEW = 512
"""Tokens that are looked at first for the mass that top-p wants."""


def uniform(seed: int, counter: int) -> float:
    """Return the random number in [0, 1) of output token `counter` under `seed`: 53 bits of their hash."""
    return (_hash(seed, counter, b"diptych draw") >> 11) * 2.0**-53


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed, in [0, 2**64), of one of several answers to a request.

    The first has the request's own, so that it is what the request would give alone.
    """
    return seed & _64_BITS if choice == 0 else _hash(seed, choice, b"diptych choice")


def _hash(seed: int, number: int, purpose: bytes) -> int:
    packed = struct.pack("<QQ", seed & _64_BITS, number)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=purpose).digest(), "little")


def sample_token(scores: Scores, row: SampleRow) -> int:
    """Sample one row's token by inverting the cumulative distribution at its random number."""
    ids, weights = distribution(scores, row.params)
    return int(ids[invert_cdf(weights, uniform(row.params.seed, len(row.output_ids)))])


def invert_cdf(weights: Weights, at: float) -> int:
    """Return the entry where the running sum of `weights` passes `at` of their total.

    It never weighs nothing. `weights` are at least 0 and one is above; `at` is in [0, 1). The order of the
    sum is fixed, and not that of the entries: first which column of a table holds the place, then which row.
    A running sum over a whole vocabulary would be a chain of 49,152 dependent additions.
    """
    columns = len(weights) // _ROWS
    if columns == 0:
        return _passes(weights.cumsum(), at)
    table = weights[: _ROWS * columns].reshape(_ROWS, columns)
    rest = weights[_ROWS * columns :]
    sums = np.append(table.sum(axis=0), rest.sum()).cumsum()
    column = _passes(sums, at)
    before = sums[column - 1] if column else 0.0
    inner = (table[:, column] if column < columns else rest).cumsum()
    row = _passes(inner, (at * sums[-1] - before) / inner[-1])
    return row * columns + column if column < columns else _ROWS * columns + row


def _passes(sums: Weights, at: float) -> int:
    """Return the first place of a running sum that is above `at` of its end.

    Rounding may leave none: the last that added something is meant then.
    """
    end = sums[-1]
    return int(min(sums.searchsorted(at * end, side="right"), sums.searchsorted(end)))


def distribution(scores: Scores, params: SamplingParams) -> tuple[npt.NDArray[np.int64], Weights]:
    """Return the ids that one row of processed scores `[vocab]` may give, and their weights.

    The weights are probabilities up to a common factor; the likeliest token's is 1. At least one score is
    above -inf.
    """
    if params.top_n_sigma > 0.0:
        scores = _within_sigmas(scores, params.top_n_sigma)
    highest, temperature = scores.max(), np.float32(params.temperature)
    ids = _possible(scores, float(highest), params)
    logs = scores if len(ids) == len(scores) else scores[ids]
    # float64 from here on: a running sum of 49,152 float32 loses the tail that a draw may point into.
    weights = np.exp((logs - highest) / temperature).astype(np.float64)
    if params.top_p < 1.0:
        kept = _nucleus(logs, weights, params.top_p)
        ids, weights = ids[kept], weights[kept]
    if params.min_p > 0.0:
        # A ratio of two probabilities: that top-p rescaled both makes no difference.
        likely = weights >= params.min_p
        ids, weights = ids[likely], weights[likely]
    return ids, weights


def _within_sigmas(scores: Scores, sigmas: float) -> Scores:
    """Return a copy of `scores` without what is more than `sigmas` standard deviations below the highest.

    Tang et al. 2024, "Top-nσ: Not All Logits Are You Need". Forbidden tokens do not count for the deviation.
    """
    possible = scores[scores > -np.inf]
    return np.where(
        scores >= possible.max() - sigmas * possible.std(dtype=np.float64), scores, np.float32(-np.inf)
    )


def _possible(scores: Scores, highest: float, params: SamplingParams) -> npt.NDArray[np.int64]:
    """Return the ids that top-k leaves; where min-p alone decides, those that it might leave."""
    if 0 < params.top_k < len(scores):
        places = topk_candidates(scores, params.top_k)
        reached = scores[places]
        if len(places) > params.top_k:
            # Everything that ties with the last one kept is kept, as in transformers.
            places = places[reached >= np.partition(reached, -params.top_k)[-params.top_k]]
        return places
    if params.min_p > 0.0 and params.top_p >= 1.0:
        # Wider than needed, so that rounding cannot matter: the weights decide.
        return np.flatnonzero(scores >= highest + params.temperature * (math.log(params.min_p) - 0.01))
    return _all(len(scores))


@lru_cache(maxsize=8)
def _all(count: int) -> npt.NDArray[np.int64]:
    ids = np.arange(count)
    ids.flags.writeable = False
    return ids


def _nucleus(logs: Scores, weights: Weights, top_p: float) -> npt.NDArray[np.int64]:
    """Return the places of the smallest set of likeliest tokens that has `top_p` of the mass, in order.

    Of equal tokens the lower places count (Holtzman et al. 2019).
    """
    total = weights.sum()
    if len(logs) > _FEW:
        # Mostly few tokens have that mass, and only these need sorting.
        places = topk_candidates(logs, _FEW)
        kept = _heaviest(places, weights[places], top_p * total)
        if len(kept) < len(places):
            return kept
    # Tokens below (1 - top_p) / n of the mass have less than 1 - top_p together, so the set lies above that
    # (half of the bound, so that rounding cannot matter).
    likely = np.flatnonzero(weights >= 0.5 * (1.0 - top_p) / len(weights) * total)
    return _heaviest(likely, weights[likely], top_p * total)


def _heaviest(places: npt.NDArray[np.int64], weights: Weights, enough: float) -> npt.NDArray[np.int64]:
    """Return those of `places` whose `weights`, one a place, come first until they are `enough`; all, if
    never.
    """
    # Sorting values is much quicker than sorting places by them.
    ranked = np.sort(weights)[::-1]
    count = max(1, int(np.count_nonzero(ranked.cumsum() - ranked < enough)))
    kept = weights >= ranked[count - 1]
    if (surplus := int(np.count_nonzero(kept)) - count) > 0:
        kept[np.flatnonzero(weights == ranked[count - 1])[-surplus:]] = False
    result: npt.NDArray[np.int64] = places[kept]
    return result
