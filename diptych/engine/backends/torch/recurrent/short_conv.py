"""The short convolution of LFM2: `out(C * conv(B * x))`, a filter over the last tokens for each lane.

Taps are added one after the other, the oldest first, so that a token's bits do not depend on how a text is
cut, nor on its neighbours in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from diptych.engine.models.recurrent import ShortConvShape


class ShortConv:
    """See `RecurrentLayer`: X is three times the width (B, C, x), Y the width."""

    def __init__(
        self,
        shape: ShortConvShape,
        tensors: Mapping[str, torch.Tensor],
        linear: Callable[..., torch.Tensor],
    ) -> None:
        self._taps, self._linear, self._tensors = shape.taps, linear, tensors
        self._filter = tensors["conv"].squeeze(1)

    def project(self, x_TH: torch.Tensor) -> torch.Tensor:
        """See `RecurrentLayer.project`."""
        return self._linear(x_TH, self._tensors["in_proj"], self._tensors.get("in_proj_bias"))

    def advance(
        self, mixed_BNX: torch.Tensor, states: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """See `RecurrentLayer.advance`."""
        before, after, x = mixed_BNX.chunk(3, dim=-1)
        products = (before * x).float()
        seen = torch.cat([*states, products], dim=1)
        count = products.shape[1]
        weight, bias = self._filter.float(), self._tensors.get("conv_bias")
        total = seen[:, :count] * weight[:, 0]
        for tap in range(1, self._taps):
            total = total + seen[:, tap : tap + count] * weight[:, tap]
        if bias is not None:
            total = total + bias.float()
        kept = (seen[:, count:].clone(),) if states else ()
        return after * total.to(after.dtype), kept

    def output(self, mixed_TY: torch.Tensor) -> torch.Tensor:
        """See `RecurrentLayer.output`."""
        return self._linear(mixed_TY, self._tensors["out_proj"], self._tensors.get("out_proj_bias"))
