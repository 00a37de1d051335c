"""The short convolution of LFM2: `out(C * conv(B * x))`, a filter over the last tokens for each lane."""

from __future__ import annotations

import torch

from diptych.engine.backends.torch.recurrent.causal_conv import causal_conv
from diptych.engine.backends.torch.recurrent.projections import Projections


class ShortConv(Projections):
    """See `RecurrentLayer`: X is three times the width (B, C, x), Y the width."""

    def advance(
        self, mixed_BNX: torch.Tensor, states: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """See `RecurrentLayer.advance`."""
        before, after, x = mixed_BNX.chunk(3, dim=-1)
        products = before * x
        seen = states[0] if states else products[:, :0].float()
        out, seen = causal_conv(products, self._filter, self._tensors.get("conv_bias"), seen)
        return after * out.to(after.dtype), (seen,) if states else ()
