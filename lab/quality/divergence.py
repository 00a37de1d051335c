"""Divergence of one precision's logits from another's: the arithmetic, and sums over windows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

Z_95 = 1.96


@dataclass(frozen=True)
class Sums:
    """Sums over the predicted tokens of one window. The reference is fp32, natural logarithms throughout."""

    tokens: int
    reference_nll: float
    """Minus log p of the text's own tokens under the reference, summed."""
    nll: float
    divergence: float
    """KL(reference, candidate) of the next token's distribution, summed, in nats."""
    agreed: int
    """Positions at which both find the same token the likeliest."""

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.tokens + other.tokens,
            self.reference_nll + other.reference_nll,
            self.nll + other.nll,
            self.divergence + other.divergence,
            self.agreed + other.agreed,
        )


NOTHING = Sums(0, 0.0, 0.0, 0.0, 0)


@dataclass(frozen=True)
class Quality:
    """A precision beside fp32 over a whole text."""

    tokens: int
    perplexity: float
    perplexity_ratio: float
    """Ratio to that of fp32: 1.01 is one percent worse."""
    ratio_error: float
    """Half of the ratio's 95% interval, from how the windows differ (0 with one window)."""
    mean_kl: float
    top1_agreement: float


def compare(reference: torch.Tensor, candidate: torch.Tensor, targets: Sequence[int]) -> Sums:
    """Compare float32 logits `[at least len(targets), vocab]`, of which row i predicts targets[i]."""
    rows = len(targets)
    index = torch.tensor(targets, dtype=torch.int64).unsqueeze(1)
    exact = reference[:rows].log_softmax(-1)
    approximate = candidate[:rows].log_softmax(-1)
    # Each row is summed in fp32, where a term is a 50,000th of the whole; rows are summed in fp64.
    divergence = (exact.exp() * (exact - approximate)).sum(-1)
    return Sums(
        tokens=rows,
        reference_nll=-float(exact.gather(1, index).double().sum()),
        nll=-float(approximate.gather(1, index).double().sum()),
        divergence=float(divergence.double().sum()),
        agreed=int((reference[:rows].argmax(-1) == candidate[:rows].argmax(-1)).sum()),
    )


def judge(windows: Iterable[Sums]) -> Quality:
    """Return the figures of a text from its windows' sums. Raises ValueError when nothing was predicted."""
    kept = [one for one in windows if one.tokens]
    total = sum(kept, NOTHING)
    if not total.tokens:
        raise ValueError("no token was predicted")
    ratio = math.exp((total.nll - total.reference_nll) / total.tokens)
    return Quality(
        tokens=total.tokens,
        perplexity=math.exp(total.nll / total.tokens),
        perplexity_ratio=ratio,
        ratio_error=ratio * Z_95 * _standard_error(kept),
        mean_kl=total.divergence / total.tokens,
        top1_agreement=total.agreed / total.tokens,
    )


def _standard_error(windows: Sequence[Sums]) -> float:
    """Return that of the mean difference in nats a token: windows are independent, tokens are not."""
    if len(windows) < 2:
        return 0.0
    differences = [(one.nll - one.reference_nll) / one.tokens for one in windows]
    return statistics.stdev(differences) / math.sqrt(len(differences))
