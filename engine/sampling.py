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

import torch

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
    """One token a row. `logits` is float32 `[len(rows), vocab]`; it is not changed.

    A row that cannot be sampled gives a SampleFailure and leaves the others alone.
    """
    if not rows:
        return []
    with torch.inference_mode():
        return _sample(logits, rows)


def _sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled | SampleFailure]:
    finite = torch.isfinite(logits).all(dim=-1).tolist()
    scores = _penalised(logits, rows)
    tokens: list[int | None] = [None] * len(rows)
    greedy = [i for i, row in enumerate(rows) if finite[i] and row.params.greedy]
    if greedy:
        for i, token in zip(greedy, _pick(scores, greedy).argmax(dim=-1).tolist(), strict=True):
            tokens[i] = token
    for i, row in enumerate(rows):
        if finite[i] and not row.params.greedy:
            tokens[i] = _draw(scores[i], row.params, uniform(row.params.seed, len(row.output_ids)))
    return _results(logits, scores, tokens, finite)


def _results(
    logits: torch.Tensor, scores: torch.Tensor, tokens: list[int | None], finite: list[bool]
) -> list[Sampled | SampleFailure]:
    # log_softmax runs row by row; a plain sum over one row would be split among threads and change its last
    # bit.
    logprobs = torch.log_softmax(logits, dim=-1)
    results: list[Sampled | SampleFailure] = []
    for i, token in enumerate(tokens):
        if not finite[i]:
            results.append(SampleFailure("the logits are not finite"))
        elif token is None or scores[i, token] == -torch.inf:
            results.append(SampleFailure("every token is suppressed"))
        else:
            results.append(Sampled(token, float(logprobs[i, token])))
    return results


def _pick(scores: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return scores if len(rows) == scores.shape[0] else scores[rows]


def _penalised(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Logits after penalties and suppression; the input itself if no row has any."""
    if not any(row.params.penalised or row.suppress for row in rows):
        return logits
    scores = logits.clone()
    for i, row in enumerate(rows):
        if row.params.penalised:
            _penalise(scores[i], row)
        if row.suppress:
            scores[i, list(row.suppress)] = -torch.inf
    return scores


def _penalise(scores: torch.Tensor, row: SampleRow) -> None:
    params = row.params
    output = torch.tensor(list(row.output_ids), dtype=torch.long)
    if params.repetition_penalty != 1.0:
        seen = torch.cat([torch.tensor(list(row.prompt_ids), dtype=torch.long), output]).unique()
        values = scores[seen]
        scores[seen] = torch.where(
            values < 0, values * params.repetition_penalty, values / params.repetition_penalty
        )
    if output.numel() and (params.frequency_penalty or params.presence_penalty):
        ids, counts = output.unique(return_counts=True)
        scores[ids] -= params.frequency_penalty * counts + params.presence_penalty


def _draw(scores: torch.Tensor, params: SamplingParams, u: float) -> int | None:
    """Token of one row by inverting the cumulative distribution at `u`; None if no token is allowed."""
    chances = distribution(scores, params)
    if chances is None:
        return None
    ids, probabilities = chances
    cumulative = probabilities.cumsum(dim=-1)
    index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    # u < 1, but u times the total may round up to the total: then the last token is meant.
    return int(ids[min(index, len(ids) - 1)])


def distribution(scores: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Ids that one row of penalised scores allows, likeliest first, and their float64 probabilities.

    None if every score is -inf.
    """
    vocab = scores.shape[-1]
    values, ids = _ranked(scores, min(params.top_k, vocab) if params.top_k else vocab)
    if values[0] == -torch.inf:
        return None
    # float64: the running sum of 49,152 float32 probabilities loses the tail that a draw may point into.
    probabilities = torch.softmax(values.double() / params.temperature, dim=-1)
    keep = int(torch.count_nonzero(probabilities))
    if params.top_p < 1.0:
        before = probabilities.cumsum(dim=-1) - probabilities
        keep = min(keep, max(1, int(torch.count_nonzero(before < params.top_p))))
    if params.min_p > 0.0:
        # A ratio of two probabilities: whether top-p rescaled both first makes no difference.
        keep = min(keep, int(torch.count_nonzero(probabilities >= params.min_p * probabilities[0])))
    kept = probabilities[:keep]
    return ids[:keep], kept / kept.sum()


def _ranked(scores: torch.Tensor, keep: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `keep` best scores and their ids, best first; ties go to the smaller id, so that the order is
    one.
    """
    if keep < scores.shape[-1]:
        # topk leaves the order of ties open: rank everything that ties with the last one kept.
        threshold = torch.topk(scores, keep).values[-1]
        candidates = torch.nonzero(scores >= threshold).squeeze(-1)
        values, order = torch.sort(scores[candidates], descending=True, stable=True)
        return values, candidates[order]
    return torch.sort(scores, descending=True, stable=True)
