"""Qwen3-VL: places of patches learned and turned, and rows for the text model's first layers beside its own.

The text model's residual takes the rows of some of the encoder's layers after each of its first layers
(DeepStack, arXiv:2406.04334): an image's row of embeddings is followed by these, `[rows, (1 + n) * hidden]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.vision.encoder import EncoderSource, EncoderTensors
from diptych.engine.vision.qwen2_vl import TOWERS, vision_fields
from diptych.engine.vision.qwen_attention import EPS, FRAMES, Attention, Merger, Pair, read_kernel
from diptych.engine.vision.qwen_grid import angles, between_places, by_squares
from diptych.engine.vision.vision_transformer import ACTIVATIONS, embed_patches

_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "temporal_patch_size": FRAMES,
    "num_position_embeddings": 2304,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": (8, 16, 24),
}


@dataclass(frozen=True)
class _Layer:
    first_norm: Pair
    attention: Attention
    second_norm: Pair
    up: Pair
    down: Pair


@dataclass(frozen=True)
class _Rows:
    """Norm and merger that make rows of a layer's patches."""

    norm: Pair
    merger: Merger
    late: bool
    """The norm is over the joined patches of a square, not over each."""

    def __call__(self, x_PH: torch.Tensor, square: int) -> torch.Tensor:
        """Return the rows `[S, text hidden]` of squares of `square` patches."""
        joined = len(x_PH) // square, -1
        x = x_PH.reshape(joined) if self.late else x_PH
        normed = functional.layer_norm(x, x.shape[1:], *self.norm, eps=EPS)
        return self.merger(normed.reshape(joined))


class Qwen3Encoder:
    """Implements `ImageEncoder`."""

    def __init__(self, source: EncoderSource) -> None:
        """Read the encoder's tensors. Raises UnsupportedModel or BadModelFile."""
        config, spec = source.config, source.spec
        fields = vision_fields(config, _DEFAULTS)
        hidden = self._hidden = fields["hidden_size"]
        self.spec = spec
        self._patch, self._heads, layers = fields["patch_size"], fields["num_heads"], fields["depth"]
        self._merge = spec.unit // self._patch
        self._act = ACTIVATIONS[fields["hidden_act"]]
        self._side = int(fields["num_position_embeddings"] ** 0.5)
        deep = fields["deepstack_visual_indexes"]
        if sorted(set(deep)) != list(deep) or not all(0 <= one < layers for one in deep):
            raise UnsupportedModel(f"vision_config.deepstack_visual_indexes {deep!r} of {layers} layers")
        self._normalise = source.normaliser()
        tensors = source.tensors(*TOWERS)
        self._patches = (
            read_kernel(tensors, hidden, self._patch),
            tensors.take("patch_embed.proj.bias", hidden),
        )
        self._places = tensors.take("pos_embed.weight", self._side**2, hidden)
        self._layers = [
            self._read_layer(tensors, f"blocks.{n}.", fields["intermediate_size"]) for n in range(layers)
        ]
        self._rows = self._read_rows(tensors, "merger.", source.text_hidden, late=False)
        self._deep = {
            layer: self._read_rows(tensors, f"deepstack_merger_list.{number}.", source.text_hidden, late=True)
            for number, layer in enumerate(deep)
        }
        tensors.refuse_others()

    def encode(self, tile: torch.Tensor) -> torch.Tensor:
        """See `ImageEncoder.encode`: `[rows, (1 + n) * hidden]`; the one tile of an image is all of it."""
        with torch.inference_mode():
            height, width = tile.shape[1] // self._patch, tile.shape[2] // self._patch
            square, order = self._merge**2, by_squares(height, width, self._merge)
            x = embed_patches(self._normalise(tile), *self._patches, self._patch)
            corners, shares = between_places(height, width, self._side)
            x = x + (self._places[corners.to(x.device)] * shares.to(x)[..., None]).sum(1)
            x = x[order.to(x.device)]
            cos, sin = angles(order, width, self._hidden // self._heads)
            turns = cos.to(x.device), sin.to(x.device)
            deep = []
            for number, layer in enumerate(self._layers):
                x = x + layer.attention(self._norm(x, layer.first_norm), turns, [len(x)])
                inner = self._act(functional.linear(self._norm(x, layer.second_norm), *layer.up))
                x = x + functional.linear(inner, *layer.down)
                if number in self._deep:
                    deep.append(self._deep[number](x, square))
            return torch.cat([self._rows(x, square), *deep], dim=1)

    def _norm(self, x: torch.Tensor, norm: Pair) -> torch.Tensor:
        return functional.layer_norm(x, (self._hidden,), *norm, eps=EPS)

    def _read_layer(self, tensors: EncoderTensors, at: str, inner: int) -> _Layer:
        hidden = self._hidden
        return _Layer(
            first_norm=tensors.pair(f"{at}norm1", hidden),
            attention=Attention.read(tensors, at, hidden, self._heads),
            second_norm=tensors.pair(f"{at}norm2", hidden),
            up=tensors.pair(f"{at}mlp.linear_fc1", inner, hidden),
            down=tensors.pair(f"{at}mlp.linear_fc2", hidden, inner),
        )

    def _read_rows(self, tensors: EncoderTensors, at: str, text_hidden: int, *, late: bool) -> _Rows:
        joined = self._hidden * self._merge**2
        merger = Merger(
            tensors.pair(f"{at}linear_fc1", joined, joined),
            tensors.pair(f"{at}linear_fc2", text_hidden, joined),
        )
        return _Rows(tensors.pair(f"{at}norm", joined if late else self._hidden), merger, late)
