"""Idefics3 and SmolVLM: a SigLIP encoder, and a connector that joins neighbouring patches into one row."""

from __future__ import annotations

import torch
from torch.nn import functional

from diptych.engine.vision.encoder import EncoderSource
from diptych.engine.vision.vision_transformer import VisionLayers, VisionShape, embed_patches

_DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


class Idefics3Encoder:
    """Implements `ImageEncoder`."""

    def __init__(self, source: EncoderSource) -> None:
        """Read the encoder's tensors. Raises UnsupportedModel or BadModelFile."""
        config, spec = source.config, source.spec
        shape = self._shape = VisionShape.of(config["vision_config"], _DEFAULTS)
        self._scale = int(config.get("scale_factor", 2))
        self.spec = spec
        self._normalise = source.normaliser()
        tensors = source.tensors("model.vision_model.")
        hidden, patch = shape.hidden, shape.patch
        self._patches = tensors.pair("embeddings.patch_embedding", hidden, 3, patch, patch)
        places = tensors.take("embeddings.position_embedding.weight", shape.side**2, hidden)
        self._places = places[position_ids(spec.tile[0] // patch, shape.side)]
        self._layers = VisionLayers(shape, tensors, shape.layers)
        self._last_norm = tensors.pair("post_layernorm", hidden)
        tensors.refuse_others((r"position_ids$",))
        connector = source.tensors("model.connector.")
        joined = hidden * self._scale**2
        self._project = connector.take("modality_projection.proj.weight", source.text_hidden, joined)
        connector.refuse_others()

    def encode(self, tile: torch.Tensor) -> torch.Tensor:
        """See `ImageEncoder.encode`."""
        with torch.inference_mode():
            x = embed_patches(self._normalise(tile), *self._patches, self._shape.patch) + self._places
            x = self._layers.norm(self._layers(x), self._last_norm)
            return functional.linear(join_patches(x, self._scale), self._project)


def position_ids(patches: int, side: int) -> torch.Tensor:
    """Return the positions `[patches²]` of a tile of `patches` a side among `side` a side.

    Each patch takes the position at its fraction of the side. The fractions are float32, so that some patches
    of a tile of the trained size take a neighbour's position; the models were trained so (NaViT,
    arXiv:2307.06304).
    """
    borders = torch.arange(1 / side, 1.0, 1 / side)
    fractions = torch.arange(patches, dtype=torch.float32) * (1.0 / torch.tensor(patches))
    at = torch.bucketize(fractions.clamp(max=1.0 - 1e-6), borders, right=True)
    return (at[:, None] * side + at[None]).flatten()


def join_patches(x_PH: torch.Tensor, scale: int) -> torch.Tensor:
    """Return `[P / scale², H * scale²]`: each square of `scale` x `scale` patches joined, line by line."""
    side, hidden = int(len(x_PH) ** 0.5), x_PH.shape[1]
    squares = x_PH.view(side // scale, scale, side // scale, scale, hidden)
    return squares.permute(0, 2, 1, 3, 4).reshape(-1, hidden * scale**2)
