"""Gemma 3: a SigLIP encoder of one size, whose patches are averaged square by square into few rows."""

from __future__ import annotations

import torch
from torch.nn import functional

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.vision.encoder import EncoderSource
from diptych.engine.vision.vision_transformer import (
    PROJECTOR_PREFIXES,
    TOWER_PREFIXES,
    VisionLayers,
    VisionShape,
    embed_patches,
)
from kernels.rms_norm import rms_norm

_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


class Gemma3Encoder:
    """Implements `ImageEncoder`."""

    def __init__(self, source: EncoderSource) -> None:
        """Read the encoder's tensors. Raises UnsupportedModel or BadModelFile."""
        config, spec = source.config, source.spec
        shape = self._shape = VisionShape.of(config["vision_config"], _DEFAULTS)
        self.spec = spec
        side = int(spec.rows_per_tile**0.5)
        if side**2 != spec.rows_per_tile or shape.side % side:
            raise UnsupportedModel("mm_tokens_per_image: they are no square of whole squares of patches")
        self._pool = shape.side // side
        self._normalise = source.normaliser()
        tensors = source.tensors(*TOWER_PREFIXES)
        hidden, patch = shape.hidden, shape.patch
        self._patches = tensors.pair("embeddings.patch_embedding", hidden, 3, patch, patch)
        self._places = tensors.take("embeddings.position_embedding.weight", shape.side**2, hidden)
        self._layers = VisionLayers(shape, tensors, shape.layers)
        self._last_norm = tensors.pair("post_layernorm", hidden)
        tensors.refuse_others((r"position_ids$", r"^.*\bhead\."))
        projector = source.tensors(*PROJECTOR_PREFIXES)
        self._project = projector.take("mm_input_projection_weight", hidden, source.text_hidden)
        self._norm = projector.take("mm_soft_emb_norm.weight", hidden).float() + 1.0  # stored less one
        projector.refuse_others()

    def encode(self, tile: torch.Tensor) -> torch.Tensor:
        """See `ImageEncoder.encode`."""
        with torch.inference_mode():
            x = embed_patches(self._normalise(tile), *self._patches, self._shape.patch) + self._places
            x = self._layers.norm(self._layers(x), self._last_norm)
            side = self._shape.side
            planes = x.T.reshape(1, self._shape.hidden, side, side)
            pooled = functional.avg_pool2d(planes, self._pool).flatten(2)[0].T
            normed = rms_norm(pooled.float(), self._norm, self._shape.eps).to(pooled.dtype)
            return normed @ self._project
