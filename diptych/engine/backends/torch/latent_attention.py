"""Attention over latents: the first half of a layer of DeepSeek-V2 and V3 (report of 2024).

Names carry shapes: T tokens, H hidden, N heads, P plain lanes of a head, R rank of a latent, D rotated lanes,
V a head's values. Matrices of keys and values are absorbed, head by head: queries are multiplied into the
latents' space, and what is mixed there into values afterwards. Nothing but a token's latent is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from diptych.engine.backends.torch.fused_layer import dense
from diptych.engine.models.shape import LATENT_EPS, LatentShape, ModelShape
from diptych.engine.weights import LayerWeights
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary

Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`attend(query [T, N, R + D], latents [T, R + D]) -> [T, N, R]`: stores latents, and attends over all."""


class LatentAttention:
    """Attention of one layer over latents."""

    def __init__(
        self, shape: ModelShape, latent: LatentShape, layer: LayerWeights, linear: Callable[..., torch.Tensor]
    ) -> None:
        self._linear, self._latent = linear, latent
        self._heads, self._rotated = shape.num_heads, shape.head_dim
        self._layer = replace(layer, experts=None, gate=None, up=None, down=None)  # which this need not keep
        self._q_a = None if layer.q_a is None else dense(layer.q_a)
        self._q, self._kept, self._o = dense(layer.q), dense(layer.k), dense(layer.o)
        assert layer.k_b is not None
        self._keys_NPR = dense(layer.k_b).view(self._heads, latent.plain, latent.rank)
        self._values_NVR = dense(layer.v).view(self._heads, latent.value, latent.rank)

    def __call__(
        self, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Return what attention adds to the residual, `[T, H]`; the angles are `[T, D / 2]`."""
        latent, layer = self._latent, self._layer
        kept = self._linear(normed, self._kept, layer.k_bias)
        made_TR, rotated_TD = kept.split([latent.rank, self._rotated], dim=-1)
        assert layer.latent_norm is not None
        rotated_TD = rotary(rotated_TD.unsqueeze(1), cos, sin).squeeze(1)
        latents = torch.cat([rms_norm(made_TR, layer.latent_norm, LATENT_EPS), rotated_TD], dim=-1)

        width = latent.plain + self._rotated
        query = self._linear(self._query_input(normed), self._q).view(-1, self._heads, width)
        plain_TNP, rotated_TND = query.split([latent.plain, self._rotated], dim=-1)
        absorbed_TNR = _by_head(plain_TNP, self._keys_NPR)
        query = torch.cat([absorbed_TNR, rotary(rotated_TND, cos, sin)], dim=-1)

        mixed_TNV = _by_head(attend(query, latents), self._values_NVR.transpose(1, 2))
        return self._linear(mixed_TNV.flatten(1), self._o, layer.o_bias)

    def _query_input(self, normed: torch.Tensor) -> torch.Tensor:
        """Return what queries are made from: the normed rows, or their own latent."""
        if self._q_a is None or self._layer.q_a_norm is None:
            return normed
        latents = self._linear(normed, self._q_a, self._layer.q_a_bias)
        return rms_norm(latents, self._layer.q_a_norm, LATENT_EPS)


def _by_head(x_TNA: torch.Tensor, matrices_NAB: torch.Tensor) -> torch.Tensor:
    """Multiply each head's rows with that head's matrix, in float32: `[T, N, B]`."""
    product = x_TNA.float().transpose(0, 1) @ matrices_NAB.float()
    return product.transpose(0, 1).to(x_TNA.dtype)
