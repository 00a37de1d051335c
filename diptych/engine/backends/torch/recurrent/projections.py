"""Matrices into a recurrent layer and out of it, with a bias where the model has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch


class Projections:
    """Base of layers that read a row by `in_proj` and give one by `out_proj`, and convolve between."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], linear: Callable[..., torch.Tensor]) -> None:
        self._tensors, self._linear = tensors, linear
        self._filter = tensors["conv"].squeeze(1)

    def project(self, x_TH: torch.Tensor) -> torch.Tensor:
        """See `RecurrentLayer.project`."""
        return self._linear(x_TH, self._tensors["in_proj"], self._tensors.get("in_proj_bias"))

    def output(self, mixed_TY: torch.Tensor) -> torch.Tensor:
        """See `RecurrentLayer.output`."""
        return self._linear(mixed_TY, self._tensors["out_proj"], self._tensors.get("out_proj_bias"))
