"""The random numbers of sampling, and the distribution they are applied to."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt

from engine.sampling.params import SamplingParams
from engine.sampling.row import SampleRow
from engine.sampling.rule import Scores

Weights = npt.NDArray[np.float64]
_64_BITS = 0xFFFFFFFFFFFFFFFF


def uniform(seed: int, counter: int) -> float:
    """The random number in [0, 1) of output token `counter` under `seed`: 53 bits of a hash of both."""
    return (_hash(seed, counter, b"diptych draw") >> 11) * 2.0**-53


def choice_seed(seed: int, choice: int) -> int:
    """The seed, in [0, 2**64), of one of several answers to a request.

    The first has the request's own, so that it is what the request would give alone.
    """
    return seed & _64_BITS if choice == 0 else _hash(seed, choice, b"diptych choice")


def _hash(seed: int, number: int, purpose: bytes) -> int:
    packed = struct.pack("<QQ", seed & _64_BITS, number)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=purpose).digest(), "little")


def draw(scores: Scores, row: SampleRow) -> int:
    """Token of one row by inverting the cumulative distribution at the row's random number."""
    ids, weights = distribution(scores, row.params)
    cumulative = weights.cumsum()
    total = cumulative[-1]
    index = cumulative.searchsorted(uniform(row.params.seed, len(row.output_ids)) * total, side="right")
    # The number is below 1, but times the total it may round up to the total: the last likely token is meant
    # then.
    return int(ids[min(index, cumulative.searchsorted(total))])


def distribution(scores: Scores, params: SamplingParams) -> tuple[npt.NDArray[np.int64], Weights]:
    """Ids that one row of scores `[vocab]`, rules applied, may give, and their probabilities up to a common
    factor.

    At least one score is above -inf. The likeliest token's weight is 1.
    """
    vocab = scores.shape[-1]
    if 0 < params.top_k < vocab:
        # Everything that ties with the last one kept is kept, as in transformers.
        threshold = np.partition(scores, vocab - params.top_k)[vocab - params.top_k]
        ids = np.flatnonzero(scores >= threshold)
    else:
        ids = np.arange(vocab)
    logs = scores[ids]
    # float64 from here on: a running sum of 49,152 float32 loses the tail that a draw may point into.
    weights = np.exp((logs - logs.max()) / np.float32(params.temperature)).astype(np.float64)
    if params.top_p < 1.0:
        ids, weights = _nucleus(ids, weights, params.top_p)
    if params.min_p > 0.0:
        # A ratio of two probabilities: that top-p rescaled both makes no difference.
        likely = weights >= params.min_p
        ids, weights = ids[likely], weights[likely]
    return ids, weights


def _nucleus(
    ids: npt.NDArray[np.int64], weights: Weights, top_p: float
) -> tuple[npt.NDArray[np.int64], Weights]:
    """The smallest set of likeliest tokens that has `top_p` of the mass (Holtzman et al. 2019), likeliest
    first.
    """
    total = weights.sum()
    # Tokens below (1 - top_p) / n of the mass have less than 1 - top_p together, so the set lies above that:
    # only what is there needs sorting (half of the bound, so that rounding cannot matter).
    above = np.flatnonzero(weights >= 0.5 * (1.0 - top_p) / len(weights) * total)
    order = above[np.argsort(-weights[above], kind="stable")]
    ranked = weights[order]
    before = ranked.cumsum() - ranked
    keep = max(1, int(np.count_nonzero(before < top_p * total)))
    return ids[order[:keep]], ranked[:keep]
