"""A head that is one decoder layer of any family over a product of embedding and feature.

EAGLE (Li et al., 2024, arXiv:2401.15077; EAGLE-2 trains the same, arXiv:2406.16858): fc of the two reads into
a layer of Llama without a first norm, and the model's own output matrix makes tokens of what it gives. A
layer for multi-token prediction (DeepSeek-V3 report, 2024, section 2.2): both are normed first, the layer is
the model's kind with attention, experts and all, and a norm of its own comes before the output matrix.

Both read what the model has behind its final norm, and so do EAGLE's authors, SGLang and vLLM. The feature
that a layer with a norm of its own gives is what lies behind that: it stands in the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from diptych.engine.backends.torch.decoder import Decoder
from diptych.engine.backends.torch.row_groups import attention_of, group_rows
from diptych.engine.batch import rotary_positions
from diptych.engine.heads.feature_head import HeadStep
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights import Weights
from kernels.rms_norm import rms_norm


@dataclass(frozen=True)
class HeadInputs:
    """Weights that make of embedding and feature what the layer reads."""

    matrix: torch.Tensor
    """`[hidden, 2 * hidden]`, of the embedding first."""
    bias: torch.Tensor | None = None
    token_norm: torch.Tensor | None = None
    """Norm of the embedding; None: there is none."""
    feature_norm: torch.Tensor | None = None


class LayerHead:
    """A `FeatureHead`, computed in torch."""

    def __init__(
        self, shape: ModelShape, weights: Weights, inputs: HeadInputs, layers: Sequence[int], *, normed: bool
    ) -> None:
        """Compute a head of `shape`, that of a model of one layer, over features before `layers`.

        `normed` says that what it gives is behind `weights.final_norm`, which is not read else.
        """
        self.shape = shape
        self.layers = layers
        self._embed, self._inputs = weights.embed, inputs
        self._norm = weights.final_norm if normed else None
        self._decoder = Decoder(shape, weights)
        self._attention = attention_of(shape, [layer.sinks for layer in weights.layers])

    def kv_layout(self, block_size: int) -> KVLayout:
        """See `FeatureHead.kv_layout`."""
        shape, dtype = self.shape, self._embed.dtype
        if shape.latent is not None:
            return KVLayout(1, 1, shape.kept_numbers, block_size, dtype, latent=True)
        return KVLayout(1, shape.num_kv_heads, shape.head_dim, block_size, dtype)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """See `FeatureHead.fuse`: they are read as they are."""
        return features.to(self._embed.dtype)

    def step(self, memory: KVMemory, steps: Sequence[HeadStep]) -> torch.Tensor:
        """See `FeatureHead.step`."""
        with torch.inference_mode():
            tokens = torch.tensor([token for step in steps for token in step.token_ids])
            shares = [step.share(memory) for step in steps]
            positions = torch.from_numpy(rotary_positions(shares))
            x = self._joined(tokens, torch.cat([step.features for step in steps]))
            attend = partial(self._attention.attend, group_rows(shares))
            x = self._decoder.through_layer(0, x, positions, attend)
            return x if self._norm is None else rms_norm(x, self._norm, self.shape.rms_eps)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """See `FeatureHead.logits`."""
        with torch.inference_mode():
            return self._decoder.logits(features)

    def _joined(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        inputs, eps = self._inputs, self.shape.rms_eps
        embedded = functional.embedding(tokens, self._embed)
        features = features.to(embedded.dtype)
        if inputs.token_norm is not None:
            embedded = rms_norm(embedded, inputs.token_norm, eps)
        if inputs.feature_norm is not None:
            features = rms_norm(features, inputs.feature_norm, eps)
        return functional.linear(torch.cat([embedded, features], dim=-1), inputs.matrix, inputs.bias)
