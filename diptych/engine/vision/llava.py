"""LLaVA: CLIP's encoder up to a layer of the config's, and two linear layers into the text model's width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.vision.encoder import EncoderSource
from diptych.engine.vision.vision_transformer import (
    ACTIVATIONS,
    PROJECTOR_PREFIXES,
    TOWER_PREFIXES,
    VisionLayers,
    VisionShape,
    embed_patches,
)

_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_UNUSED = (r"position_ids$", r"post_layernorm\.", r"encoder\.layers\.\d+\.")
"""Tensors behind the layer that is read: the text model never sees what they make."""


class LlavaEncoder:
    """Implements `ImageEncoder`."""

    def __init__(self, source: EncoderSource) -> None:
        """Read the encoder's tensors. Raises UnsupportedModel or BadModelFile."""
        config, spec = source.config, source.spec
        shape = self._shape = VisionShape.of(config["vision_config"], _DEFAULTS)
        self.spec = spec
        self._drops_class = config.get("vision_feature_select_strategy", "default") == "default"
        self._normalise = source.normaliser()
        hidden, patch, text_hidden = shape.hidden, shape.patch, source.text_hidden
        tensors = source.tensors(*TOWER_PREFIXES)
        self._class = tensors.take("embeddings.class_embedding", hidden)
        self._patches = tensors.take("embeddings.patch_embedding.weight", hidden, 3, patch, patch)
        self._places = tensors.take("embeddings.position_embedding.weight", shape.side**2 + 1, hidden)
        self._first_norm = tensors.pair("pre_layrnorm", hidden)
        self._layers = VisionLayers(shape, tensors, _layers_read(config, shape.layers))
        tensors.refuse_others(_UNUSED)
        projector = source.tensors(*PROJECTOR_PREFIXES)
        self._act = ACTIVATIONS[_projector_activation(config)]
        biased = config.get("multimodal_projector_bias", True)
        self._linears = [
            (
                projector.take(f"{name}.weight", *size),
                projector.take(f"{name}.bias", size[0]) if biased else None,
            )
            for name, size in (("linear_1", (text_hidden, hidden)), ("linear_2", (text_hidden, text_hidden)))
        ]
        projector.refuse_others()

    def encode(self, tile: torch.Tensor) -> torch.Tensor:
        """See `ImageEncoder.encode`."""
        with torch.inference_mode():
            x = embed_patches(self._normalise(tile), self._patches, None, self._shape.patch)
            x = torch.cat([self._class[None], x]) + self._places
            x = self._layers(self._layers.norm(x, self._first_norm))
            if self._drops_class:
                x = x[1:]
            first, second = self._linears
            return functional.linear(self._act(functional.linear(x, *first)), *second)


def _layers_read(config: Mapping[str, Any], layers: int) -> int:
    """Return how many of the encoder's layers come before the output that is taken."""
    layer = config.get("vision_feature_layer", -2)
    if not isinstance(layer, int) or isinstance(layer, bool):
        raise UnsupportedModel("vision_feature_layer: several layers are not computed")
    count = layers + 1 + layer if layer < 0 else layer
    if not 0 <= count <= layers:
        raise UnsupportedModel(f"vision_feature_layer {layer}: the encoder has {layers} layers")
    return count


def _projector_activation(config: Mapping[str, Any]) -> str:
    name = str(config.get("projector_hidden_act", "gelu"))
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"projector_hidden_act {name!r} is not computed")
    return name
