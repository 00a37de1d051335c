"""The vision transformer of SigLIP and CLIP: patches of a tile attend to one another, in layers of one form.

Names carry shapes: P patches (and the class token, where there is one), H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.vision.encoder import EncoderTensors


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


TOWER_PREFIXES = (
    "model.vision_tower.vision_model.",
    "vision_tower.vision_model.",
    "model.vision_tower.",
    "vision_tower.",
)
"""Prefixes of an encoder's tensors, in files of several ages."""
PROJECTOR_PREFIXES = ("model.multi_modal_projector.", "multi_modal_projector.")
"""Prefixes of what makes rows for the text model."""
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "silu": functional.silu,
}


@dataclass(frozen=True)
class VisionShape:
    """Sizes of a vision transformer; those of a `vision_config`."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    patch: int
    side: int
    """Patches of a side of the images that it was trained with, each of which has a position."""
    activation: str
    eps: float

    @classmethod
    def of(cls, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> VisionShape:
        """Read a `vision_config`. Raises UnsupportedModel, naming the field."""
        fields = {**defaults, **{name: value for name, value in config.items() if value is not None}}
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            if not isinstance(fields[name], int) or fields[name] < 1:
                raise UnsupportedModel(f"vision_config.{name}: must be a whole number above 0")
        if fields["hidden_size"] % fields["num_attention_heads"]:
            raise UnsupportedModel("vision_config.num_attention_heads: must divide hidden_size")
        if fields["hidden_act"] not in ACTIVATIONS:
            raise UnsupportedModel(f"vision_config.hidden_act {fields['hidden_act']!r} is not computed")
        if fields.get("num_channels", 3) != 3:
            raise UnsupportedModel("vision_config.num_channels: images have three")
        return cls(
            fields["hidden_size"],
            fields["intermediate_size"],
            fields["num_hidden_layers"],
            fields["num_attention_heads"],
            fields["patch_size"],
            fields["image_size"] // fields["patch_size"],
            fields["hidden_act"],
            fields["layer_norm_eps"],
        )


@dataclass(frozen=True)
class _Layer:
    first_norm: tuple[torch.Tensor, torch.Tensor]
    qkv: tuple[torch.Tensor, torch.Tensor]
    out: tuple[torch.Tensor, torch.Tensor]
    second_norm: tuple[torch.Tensor, torch.Tensor]
    up: tuple[torch.Tensor, torch.Tensor]
    down: tuple[torch.Tensor, torch.Tensor]


class VisionLayers:
    """The layers of a vision transformer."""

    def __init__(self, shape: VisionShape, tensors: EncoderTensors, count: int) -> None:
        """Read the first `count` layers."""
        self.shape = shape
        self._act = ACTIVATIONS[shape.activation]
        self._layers = [_read_layer(shape, tensors, f"encoder.layers.{number}.") for number in range(count)]

    def __call__(self, x_PH: torch.Tensor) -> torch.Tensor:
        """Return the output `[P, H]` of the last layer that was read."""
        for layer in self._layers:
            x_PH = x_PH + self._attend(layer, self.norm(x_PH, layer.first_norm))
            inner = self._act(functional.linear(self.norm(x_PH, layer.second_norm), *layer.up))
            x_PH = x_PH + functional.linear(inner, *layer.down)
        return x_PH

    def norm(self, x: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return `x` normalised over its last axis."""
        return functional.layer_norm(x, (self.shape.hidden,), *weights, eps=self.shape.eps)

    def _attend(self, layer: _Layer, x_PH: torch.Tensor) -> torch.Tensor:
        patches, hidden = x_PH.shape
        joined = functional.linear(x_PH, *layer.qkv).view(patches, 3, self.shape.heads, -1)
        q, k, v = joined.permute(1, 2, 0, 3).unbind(0)
        mixed = functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return functional.linear(mixed.transpose(0, 1).reshape(patches, hidden), *layer.out)


def embed_patches(
    tile: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None, patch: int
) -> torch.Tensor:
    """Return the embeddings `[P, H]` of a normalised tile's patches, row by row."""
    found = functional.conv2d(tile[None].to(kernel.dtype), kernel, bias, stride=patch)
    return found[0].flatten(1).T


def _read_layer(shape: VisionShape, tensors: EncoderTensors, at: str) -> _Layer:
    hidden, inner = shape.hidden, shape.intermediate
    parts = [tensors.pair(f"{at}self_attn.{name}_proj", hidden, hidden) for name in "qkv"]
    weights, biases = zip(*parts, strict=True)
    return _Layer(
        first_norm=tensors.pair(f"{at}layer_norm1", hidden),
        qkv=(torch.cat(weights), torch.cat(biases)),
        out=tensors.pair(f"{at}self_attn.out_proj", hidden, hidden),
        second_norm=tensors.pair(f"{at}layer_norm2", hidden),
        up=tensors.pair(f"{at}mlp.fc1", inner, hidden),
        down=tensors.pair(f"{at}mlp.fc2", hidden, inner),
    )
