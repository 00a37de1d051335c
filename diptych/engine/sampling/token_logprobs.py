"""What the model thought of tokens: log-probability, rank, alternatives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from diptych.engine.sampling.logits_processor import Scores
from diptych.engine.sampling.sample_row import TokenLogprob
from diptych.engine.sampling.topk import largest, log_total


def score_tokens(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprob]:
    """The score of token_ids[i] under logits[i], with `count` alternatives each.

    `logits` is float32 `[at least len(token_ids), vocab]` on the CPU, and is not changed. Raises ValueError
    for logits that are not finite: there are no probabilities then.
    """
    rows: Scores = logits.detach().numpy()[: len(token_ids)]
    if not np.isfinite(rows).all():
        raise ValueError("the logits are not finite")
    return [scores_of(row, [token], count)[0] for row, token in zip(rows, token_ids, strict=True)]


def scores_of(logits: Scores, token_ids: Sequence[int], count: int) -> list[TokenLogprob]:
    """Scores of several tokens under one finite row of logits, `[vocab]`, with `count` alternatives each."""
    shift = log_total(logits)
    alternatives = largest(logits, count)
    top = tuple(zip(alternatives.tolist(), (logits[alternatives] - shift).tolist(), strict=True))
    return [
        TokenLogprob(float(logits[token] - shift), int(np.count_nonzero(logits > logits[token])) + 1, top)
        for token in token_ids
    ]
