"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, and a draw that time and neighbours do
not sway.

The order is that of transformers' logits processors: repetition penalty, then temperature, top-k, top-p,
min-p (frequency and presence penalties, which transformers lacks, come right after repetition, as in vLLM).

The draw is counter-based: its one random number is a hash of (seed, index of the output token). A request
that is resumed elsewhere after any fault continues with the same tokens, and a row never depends on the batch
around it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Scores = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow float32 for ordinary logits."""


@dataclass(frozen=True)
class SamplingParams:
    """Resolved values, every one of them validated already."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True)
class SampleRow:
    """What one row of logits is sampled with."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    """Tokens emitted so far; their number is the counter of the draw."""
    suppress: Sequence[int] = ()
    """Tokens that must not come now (stop tokens while min_tokens is not reached)."""


@dataclass(frozen=True)
class Sampled:
    """The token of a row, with its log-probability under the model (before penalties and temperature)."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class SampleFailure:
    """The row has no token to give: its logits are NaN or infinite, or everything is suppressed."""

    reason: str


def uniform(seed: int, counter: int) -> float:
    """The random number in [0, 1) of output token `counter` under `seed`: 53 bits of a hash of both."""
    digest = hashlib.blake2b(
        struct.pack("<QQ", seed & 0xFFFFFFFFFFFFFFFF, counter), digest_size=8, person=b"diptych draw"
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled | SampleFailure]:
    """One token a row. `logits` is float32 `[len(rows), vocab]` on the CPU; it is not changed.

    A row that cannot be sampled gives a SampleFailure and leaves the others alone.
    """
    if not rows:
        return []
    # numpy: its reductions are ten times as fast as torch's, and wake no OpenMP threads that would then spin
    # on the cores of the other workers.
    plain: Scores = logits.detach().numpy()
    finite = np.isfinite(plain.max(axis=-1)) & np.isfinite(plain.min(axis=-1))
    scores = _penalised(plain, rows, finite)
    best = scores.argmax(axis=-1)
    results: list[Sampled | SampleFailure] = []
    for i, row in enumerate(rows):
        if not finite[i]:
            results.append(SampleFailure("the logits are not finite"))
        elif scores[i, best[i]] == -np.inf:
            results.append(SampleFailure("every token is suppressed"))
        else:
            token = int(best[i]) if row.params.greedy else _draw(scores[i], row)
            results.append(Sampled(token, _logprob(plain[i], token)))
    return results


def _logprob(logits: Scores, token: int) -> float:
    highest = logits.max()
    return float(logits[token] - highest - np.log(np.exp(logits - highest).sum()))


def _penalised(plain: Scores, rows: Sequence[SampleRow], finite: npt.NDArray[np.bool_]) -> Scores:
    """Logits after penalties and suppression; the input itself if no row has any."""
    if not any(row.params.penalised or row.suppress for row in rows):
        return plain
    scores = plain.copy()
    for i, row in enumerate(rows):
        if finite[i] and row.params.penalised:
            _penalise(scores[i], row)
        if row.suppress:
            scores[i, list(row.suppress)] = -np.inf
    return scores


def _penalise(scores: Scores, row: SampleRow) -> None:
    params = row.params
    output = np.fromiter(row.output_ids, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        seen = np.union1d(np.fromiter(row.prompt_ids, dtype=np.int64), output)
        values = scores[seen]
        scores[seen] = np.where(
            values < 0, values * params.repetition_penalty, values / params.repetition_penalty
        )
    if output.size and (params.frequency_penalty or params.presence_penalty):
        ids, counts = np.unique(output, return_counts=True)
        scores[ids] -= params.frequency_penalty * counts + params.presence_penalty


def _draw(scores: Scores, row: SampleRow) -> int:
    """Token of one row by inverting the cumulative distribution at the row's random number."""
    ids, weights = distribution(scores, row.params)
    cumulative = weights.cumsum()
    total = cumulative[-1]
    index = cumulative.searchsorted(uniform(row.params.seed, len(row.output_ids)) * total, side="right")
    # The number is below 1, but times the total it may round up to the total: the last likely token is meant
    # then.
    return int(ids[min(index, cumulative.searchsorted(total))])


def distribution(scores: Scores, params: SamplingParams) -> tuple[npt.NDArray[np.int64], Weights]:
    """Ids that one row of penalised scores `[vocab]` may give, and their probabilities up to a common factor.

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
