"""Routing of rows to experts: which ones compute a row, and with what weights.

Scores are float32. `softmax` scores all experts against each other (Shazeer et al. 2017; Qwen3-MoE, Mixtral,
OLMoE, DeepSeek-V2), `sigmoid` each by itself (DeepSeek-V3, GLM-4.5), `softmax_of_chosen` chooses by the
logits and scores the chosen ones against each other (Granite-MoE, gpt-oss).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen"]
GroupScore = Literal["largest", "two_largest"]
_LEAST_SUM = 1e-20
"""Added to the sum that sigmoid scores are divided by."""


@dataclass(frozen=True)
class Routing:
    """How rows choose their experts."""

    per_token: int
    """Experts of a row."""
    scoring: Scoring = "softmax"
    normalised: bool = False
    """True if the scores of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Factor of the weights."""
    groups: int = 1
    """Groups of consecutive experts, all of one size."""
    chosen_groups: int = 1
    """Groups whose experts a row may choose: those of the highest score."""
    group_score: GroupScore = "largest"
    """Score of a group: its largest one, or the sum of its two largest."""


def route_experts(
    logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return experts and weights of rows: int64 and float32 `[rows, per_token]`, experts in ascending order.

    `logits` are float32 `[rows, experts]`. `correction`, float32 `[experts]`, is added to the scores for the
    choice alone (DeepSeek-V3 report, 2024). Of equal scores the expert or group of the lower number is
    chosen. A row depends on no other.
    """
    match routing.scoring:
        case "softmax":
            scores = torch.softmax(logits, dim=-1)
        case "sigmoid":
            scores = torch.sigmoid(logits)
        case "softmax_of_chosen":
            scores = logits
    chances = scores if correction is None else scores + correction
    if routing.groups > 1:
        chances = _within_groups(chances, routing)
    experts = _largest(chances, routing.per_token).sort(dim=-1).values
    weights = scores.gather(-1, experts)
    if routing.scoring == "softmax_of_chosen":
        weights = torch.softmax(weights, dim=-1)
    elif routing.normalised:
        least = _LEAST_SUM if routing.scoring == "sigmoid" else 0.0
        weights = weights / (weights.sum(dim=-1, keepdim=True) + least)
    return experts, weights * routing.scale


def _within_groups(chances: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return `chances [rows, experts]` with -inf in all groups but the row's best ones."""
    grouped = chances.unflatten(-1, (routing.groups, -1))
    best = 1 if routing.group_score == "largest" else 2
    groups = _largest(grouped.topk(best, dim=-1).values.sum(dim=-1), routing.chosen_groups)
    closed = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=chances.device).scatter(
        -1, groups, False
    )
    return grouped.masked_fill(closed.unsqueeze(-1), -torch.inf).flatten(-2)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places of the `count` largest `values [rows, n]`; of equal ones the first."""
    return values.argsort(dim=-1, descending=True, stable=True)[:, :count]
