"""Causal convolution of each channel by itself, over a token and the few before it.

Names carry shapes: B sequences with N tokens each, C channels, K taps. A sequence's state is its last K - 1
inputs, float32 `[K - 1, C]`, the oldest first; zeros before the first token.
"""

from __future__ import annotations

import torch


def causal_conv(
    x_BNC: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the convolution of the sequences' next inputs, float32 `[B, N, C]`, and the states after them.

    Output t is `bias + sum over k of weight[:, k] x[t - K + 1 + k]`. Taps are added oldest first, row by row:
    a row has the same bits however a text is cut.
    """
    weight, rows = weight_CK.float(), x_BNC.shape[1]
    seen = torch.cat([states, x_BNC.float()], dim=1)
    out = seen[:, :rows] * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        out.addcmul_(seen[:, tap : tap + rows], weight[:, tap])
    return out if bias_C is None else out + bias_C.float(), seen[:, rows:].clone()
