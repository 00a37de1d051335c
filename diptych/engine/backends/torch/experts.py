"""The feed-forward of experts in torch: the meaning of `ExpertsShape`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from diptych.engine.models.shape import Activation, ExpertsShape, UnsupportedModel
from diptych.engine.weights import ExpertWeights


def experts_forward(
    experts: ExpertsShape,
    activation: Activation,
    weights: ExpertWeights,
    x_TH: torch.Tensor,
    linear: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Return `[T, H]`: the weighted outputs of each token's experts, and of the shared one, of `x_TH [T, H]`.

    `linear(x, matrix, bias)` is the product that fits the model's storage, with dense matrices.
    """
    raise UnsupportedModel("experts are not computed")
