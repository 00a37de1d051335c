"""An EAGLE-3 head: one decoder layer over the model's own features (Li et al., 2025, arXiv:2503.01840).

The feature of a token (feature_head.py) is `fc` of the residual stream before three layers of the model. The
output matrix has a draft vocabulary, of the frequent tokens; `d2t` leads from there to the model's.

Published files are a folder with config.json (`draft_vocab_size`) and safetensors: `fc.weight`,
`midlayer.hidden_norm.weight`, `midlayer.input_layernorm.weight`, `midlayer.self_attn.*`, `midlayer.mlp.*`,
`midlayer.post_attention_layernorm.weight`, `norm.weight`, `lm_head.weight`, `d2t` (the differences of the two
numbers), and `embed_tokens.weight` where that is not the model's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from diptych.engine.backends.torch.row_groups import attention_of, group_rows
from diptych.engine.batch import SequenceStep, rotary_positions
from diptych.engine.heads.eagle3_files import Eagle3Weights
from diptych.engine.heads.feature_head import HeadStep
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.models.rope import cos_sin
from diptych.engine.models.shape import ModelShape
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary

NEVER = -1e9
"""Logit of a token outside the draft vocabulary; finite, as samplers want them."""


class Eagle3Head:
    """A `FeatureHead`, computed in torch."""

    def __init__(self, shape: ModelShape, weights: Eagle3Weights, vocab_size: int) -> None:
        """Compute a head of `shape`, that of a one-layer Llama, for a model of `vocab_size`."""
        self.shape = shape
        self.layers = weights.layers
        self._weights = weights
        self._vocab_size = vocab_size
        self._attention = attention_of(shape, [None])

    @property
    def draft_vocab_size(self) -> int:
        """Number of tokens that it can draft."""
        return len(self._weights.draft_tokens)

    def kv_layout(self, block_size: int) -> KVLayout:
        """See `FeatureHead.kv_layout`."""
        shape = self.shape
        return KVLayout(1, shape.num_kv_heads, shape.head_dim, block_size, self._weights.fc.dtype)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """See `FeatureHead.fuse`."""
        with torch.inference_mode():
            return functional.linear(features.to(self._weights.fc.dtype), self._weights.fc)

    def step(self, memory: KVMemory, steps: Sequence[HeadStep]) -> torch.Tensor:
        """See `FeatureHead.step`."""
        with torch.inference_mode():
            return self._step(memory, steps)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """See `FeatureHead.logits`; those of tokens that it never drafts are NEVER."""
        weights = self._weights
        with torch.inference_mode():
            drafts = functional.linear(rms_norm(features, weights.norm, self.shape.rms_eps), weights.lm_head)
            logits = torch.full((len(features), self._vocab_size), NEVER)
            logits[:, weights.draft_tokens] = drafts.float()
            return logits

    def _step(self, memory: KVMemory, steps: Sequence[HeadStep]) -> torch.Tensor:
        weights, eps = self._weights, self.shape.rms_eps
        tokens = torch.tensor([token for step in steps for token in step.token_ids])
        feature = torch.cat([step.features for step in steps]).to(weights.fc.dtype)
        embedded = functional.embedding(tokens, weights.embed).to(feature.dtype)
        normed = rms_norm(feature, weights.hidden_norm, eps)
        both = torch.cat([rms_norm(embedded, weights.input_norm, eps), normed], dim=-1)
        residual = normed if weights.norm_before_residual else feature
        residual = residual + self._attend([step.share(memory) for step in steps], both)
        x = rms_norm(residual, weights.post_norm, eps)
        gate, up = functional.linear(x, weights.gate), functional.linear(x, weights.up)
        return residual + functional.linear(functional.silu(gate) * up, weights.down)

    def _attend(self, shares: Sequence[SequenceStep], both: torch.Tensor) -> torch.Tensor:
        weights, shape = self._weights, self.shape
        positions = torch.from_numpy(rotary_positions(shares))
        cos, sin = (part.to(both.dtype) for part in cos_sin(shape, 0, positions))
        q, k, v = (
            functional.linear(both, matrix, bias).unflatten(-1, (-1, shape.head_dim))
            for matrix, bias in weights.qkv
        )
        q, k = rotary(q, cos, sin), rotary(k, cos, sin)
        mixed = self._attention.attend(group_rows(shares), 0, q, k, v)
        return functional.linear(mixed.flatten(1), weights.output)
