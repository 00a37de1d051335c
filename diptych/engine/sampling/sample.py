"""Sampling of one token for each row of a step's logits, and the candidates of beams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from diptych.engine.sampling.logits_processor import Scores
from diptych.engine.sampling.random import sample_token
from diptych.engine.sampling.sample_row import Candidate, Sampled, SampleFailure, SampleRow
from diptych.engine.sampling.topk import log_sum_exp, row_logprobs, topk

NOT_FINITE = SampleFailure("the logits are not finite")
NOTHING_LEFT = SampleFailure("every token is forbidden", by_request=True)


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled | SampleFailure]:
    """Sample one token a row. `logits` is float32 `[len(rows), vocab]` on the CPU; it is not changed.

    A row that cannot be sampled gives a SampleFailure and leaves the others alone.
    """
    if not rows:
        return []
    # numpy: its reductions are ten times as fast as torch's, and wake no OpenMP threads that would then spin
    # on the cores of the other workers.
    plain: Scores = logits.detach().numpy()
    # A plain greedy row costs these two passes and nothing else. argmax finds a NaN, if there is one.
    best = plain.argmax(axis=-1)
    finite = np.isfinite(plain[np.arange(len(rows)), best]) & np.isfinite(plain.min(axis=-1))
    return [
        _sample(plain[i], row, token) if ok else NOT_FINITE
        for i, (row, token, ok) in enumerate(zip(rows, best.tolist(), finite.tolist(), strict=True))
    ]


Choice = Callable[[Sequence[int]], Sequence[int]]
"""Places of tokens, likeliest first, that are wanted."""


def candidates(
    logits: torch.Tensor, rows: Sequence[SampleRow], count: int, wanted: Choice | None = None
) -> list[list[Candidate] | SampleFailure]:
    """Return the `count` likeliest tokens of each row after its logits processors, likeliest first.

    Of equal ones the lower id comes first. With `wanted`, those of them that it chooses. As in transformers'
    beam search the processors change log-probabilities, which are not normalised again. Temperature, top-k,
    top-p and min-p play no part. Fewer come where the processors allow fewer. `logits` as in `sample`.
    """
    plain: Scores = logits.detach().numpy()
    return [
        _candidates(plain[i], row, count, wanted) if np.isfinite(plain[i]).all() else NOT_FINITE
        for i, row in enumerate(rows)
    ]


def _sample(plain: Scores, row: SampleRow, best: int) -> Sampled | SampleFailure:
    """Return the token of one row of finite logits whose likeliest token is `best`."""
    params, scores = row.params, plain
    if row.ruled:
        scores = _process(plain.copy(), row)
        best = int(scores.argmax())
        if scores[best] == -np.inf:
            return NOTHING_LEFT
    token = best if params.greedy else sample_token(scores, row)
    if params.logprobs is None:
        return Sampled(token)
    return Sampled(token, row_logprobs(plain, [token], params.logprobs)[0])


def _candidates(
    plain: Scores, row: SampleRow, count: int, wanted: Choice | None
) -> list[Candidate] | SampleFailure:
    scores = plain - log_sum_exp(plain)
    if row.ruled:
        _process(scores, row)
    ids = topk(scores, count)
    if not len(ids):
        return NOTHING_LEFT
    if wanted is not None:
        ids = ids[wanted(ids.tolist())]
    tokens, logprobs = ids.tolist(), scores[ids].tolist()
    if row.params.logprobs is None:
        return [Candidate(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]
    told = row_logprobs(plain, tokens, row.params.logprobs)
    return [Candidate(*fields) for fields in zip(tokens, logprobs, told, strict=True)]


def _process(scores: Scores, row: SampleRow) -> Scores:
    """`scores`, changed in place by everything that the row asks for."""
    for processor in row.params.logits_processors:
        processor.apply(scores, row)
    if row.suppress:
        scores[list(row.suppress)] = -np.inf
    if row.mask is not None:
        row.mask.apply(scores)
    return scores
