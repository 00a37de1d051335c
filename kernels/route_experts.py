"""Routing of rows to experts: which ones compute a row, and with what weights.

Scores are float32. `softmax_then_topk` scores all experts against each other (Shazeer et al. 2017; Qwen3-MoE,
Mixtral, OLMoE, DeepSeek-V2), `sigmoid` each by itself (DeepSeek-V3, GLM-4.5), `topk_then_softmax` picks by
the logits and scores the picked ones against each other (Granite-MoE, gpt-oss).
"""

from __future__ import annotations

from typing import Literal

import torch

_LEAST_SUM = 1e-20
"""Added to the sum that sigmoid scores are divided by."""


def route_experts(
    logits: torch.Tensor,
    correction: torch.Tensor | None = None,
    *,
    count: int,
    routing: Literal["softmax_then_topk", "topk_then_softmax", "sigmoid"] = "softmax_then_topk",
    normalise: bool = False,
    scale: float = 1.0,
    groups: int = 1,
    groups_per_token: int = 1,
    group_score: Literal["best", "best_two"] = "best",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return experts and weights of rows: int64 and float32 `[rows, count]`, experts in ascending order.

    `logits` are float32 `[rows, experts]`. `correction`, float32 `[experts]`, is added to the scores for
    picking alone (DeepSeek-V3 report, 2024). With `groups` of consecutive experts a row picks from its best
    `groups_per_token`, whose score is that of their best expert or the sum of their best two. `normalise`
    divides the picked scores by their sum, then `scale` multiplies them. Of equal scores the expert or group
    of the lower number is picked. A row depends on no other.
    """
    match routing:
        case "softmax_then_topk":
            scores = torch.softmax(logits, dim=-1)
        case "sigmoid":
            scores = torch.sigmoid(logits)
        case "topk_then_softmax":
            scores = logits
    chances = scores if correction is None else scores + correction
    if groups > 1:
        grouped = chances.unflatten(-1, (groups, -1))
        best = grouped.topk(1 if group_score == "best" else 2, dim=-1).values.sum(dim=-1)
        picked = _largest(best, groups_per_token)
        closed = torch.ones_like(best, dtype=torch.bool).scatter(-1, picked, False)
        chances = grouped.masked_fill(closed.unsqueeze(-1), -torch.inf).flatten(-2)
    experts = _largest(chances, count).sort(dim=-1).values
    weights = scores.gather(-1, experts)
    if routing == "topk_then_softmax":
        weights = torch.softmax(weights, dim=-1)
    elif normalise:
        least = _LEAST_SUM if routing == "sigmoid" else 0.0
        weights = weights / (weights.sum(dim=-1, keepdim=True) + least)
    return experts, weights * scale


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places of the `count` largest `values [rows, n]`; of equal ones the first."""
    return values.argsort(dim=-1, descending=True, stable=True)[:, :count]
