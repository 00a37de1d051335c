"""Qwen2-VL and Qwen2.5-VL: an image keeps its own size, and patches are turned by their lines and columns.

In Qwen2.5-VL most layers attend within windows, and layers are those of a text model: RMS norms and a gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.vision.encoder import EncoderSource, EncoderTensors
from diptych.engine.vision.qwen_attention import EPS, FRAMES, Attention, Merger, Pair, read_kernel
from diptych.engine.vision.qwen_grid import angles, by_squares, windows
from diptych.engine.vision.vision_transformer import ACTIVATIONS, embed_patches
from kernels.rms_norm import rms_norm

TOWERS = ("model.visual.", "visual.")
_COMMON = {"depth": 32, "num_heads": 16, "patch_size": 14, "temporal_patch_size": FRAMES}
_QWEN2 = {**_COMMON, "embed_dim": 1280, "mlp_ratio": 4, "hidden_act": "quick_gelu"}
_QWEN2_5 = {
    **_COMMON,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "hidden_act": "silu",
    "window_size": 112,
    "fullatt_block_indexes": (7, 15, 23, 31),
}


def vision_fields(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `vision_config`. Raises UnsupportedModel, naming the field."""
    given = config["vision_config"]
    fields = {**defaults, **{name: given[name] for name in defaults if given.get(name) is not None}}
    for name, default in defaults.items():
        if isinstance(default, int) and (not isinstance(fields[name], int) or fields[name] < 1):
            raise UnsupportedModel(f"vision_config.{name}: must be a whole number above 0")
    if fields["temporal_patch_size"] != FRAMES:
        raise UnsupportedModel("vision_config.temporal_patch_size: patches have two frames")
    if fields["hidden_act"] not in ACTIVATIONS:
        raise UnsupportedModel(f"vision_config.hidden_act {fields['hidden_act']!r} is not computed")
    return fields


@dataclass(frozen=True)
class _Layer:
    first_norm: Pair
    attention: Attention
    second_norm: Pair
    up: Pair
    down: Pair
    gate: Pair | None


class QwenEncoder:
    """Implements `ImageEncoder`."""

    def __init__(self, source: EncoderSource) -> None:
        """Read the encoder's tensors. Raises UnsupportedModel or BadModelFile."""
        config, spec = source.config, source.spec
        windowed = config["model_type"] == "qwen2_5_vl"
        fields = vision_fields(config, _QWEN2_5 if windowed else _QWEN2)
        hidden = self._hidden = fields["hidden_size" if windowed else "embed_dim"]
        self.spec, self._gated = spec, windowed
        self._patch, self._heads, layers = fields["patch_size"], fields["num_heads"], fields["depth"]
        self._merge = spec.unit // self._patch
        inner = fields["intermediate_size"] if windowed else hidden * fields["mlp_ratio"]
        self._act = ACTIVATIONS[fields["hidden_act"]]
        self._window = fields["window_size"] // spec.unit if windowed else 0
        self._full = frozenset(fields["fullatt_block_indexes"]) if windowed else frozenset(range(layers))
        if windowed and self._window < 1:
            raise UnsupportedModel("vision_config.window_size: a window is smaller than a row's patches")
        self._normalise = source.normaliser()
        tensors = source.tensors(*TOWERS)
        self._kernel = read_kernel(tensors, hidden, self._patch)
        self._layers = [self._read_layer(tensors, f"blocks.{n}.", inner) for n in range(layers)]
        self._last_norm = self._read_norm(tensors, "merger.ln_q")
        joined = hidden * self._merge**2
        self._merger = Merger(
            tensors.pair("merger.mlp.0", joined, joined),
            tensors.pair("merger.mlp.2", source.text_hidden, joined),
        )
        tensors.refuse_others()

    def encode(self, tile: torch.Tensor) -> torch.Tensor:
        """See `ImageEncoder.encode`: the one tile of an image is all of it."""
        with torch.inference_mode():
            x = embed_patches(self._normalise(tile), self._kernel, None, self._patch)
            height, width = tile.shape[1] // self._patch, tile.shape[2] // self._patch
            order = by_squares(height, width, self._merge)
            whole, square = [height * width], self._merge**2
            cut = whole
            back = None
            if self._window:
                by_window, squares = windows(height // self._merge, width // self._merge, self._window)
                order = order.view(-1, square)[by_window].flatten()
                back, cut = by_window.argsort(), [count * square for count in squares]
            turns = tuple(part.to(x.device) for part in angles(order, width, self._hidden // self._heads))
            x = x[order.to(x.device)]
            for number, layer in enumerate(self._layers):
                x = self._layer(layer, x, (turns[0], turns[1]), whole if number in self._full else cut)
            rows = self._merger(self._norm(x, self._last_norm).view(len(x) // square, -1))
            return rows if back is None else rows[back.to(rows.device)]

    def _layer(self, layer: _Layer, x: torch.Tensor, turns: Pair, lengths: list[int]) -> torch.Tensor:
        x = x + layer.attention(self._norm(x, layer.first_norm), turns, lengths)
        normed = self._norm(x, layer.second_norm)
        inner = functional.linear(normed, *layer.up)
        inner = (
            self._act(inner)
            if layer.gate is None
            else self._act(functional.linear(normed, *layer.gate)) * inner
        )
        return x + functional.linear(inner, *layer.down)

    def _norm(self, x: torch.Tensor, norm: Pair) -> torch.Tensor:
        if self._gated:
            return rms_norm(x, norm[0], EPS)
        return functional.layer_norm(x, (self._hidden,), *norm, eps=EPS)

    def _read_norm(self, tensors: EncoderTensors, name: str) -> Pair:
        """Return weight and bias of a norm; an RMS norm has no bias, its weight stands twice."""
        if not self._gated:
            return tensors.pair(name, self._hidden)
        weight = tensors.take(f"{name}.weight", self._hidden)
        return weight, weight

    def _read_layer(self, tensors: EncoderTensors, at: str, inner: int) -> _Layer:
        hidden = self._hidden
        up, down = ("up_proj", "down_proj") if self._gated else ("fc1", "fc2")
        return _Layer(
            first_norm=self._read_norm(tensors, f"{at}norm1"),
            attention=Attention.read(tensors, at, hidden, self._heads),
            second_norm=self._read_norm(tensors, f"{at}norm2"),
            up=tensors.pair(f"{at}mlp.{up}", inner, hidden),
            down=tensors.pair(f"{at}mlp.{down}", hidden, inner),
            gate=tensors.pair(f"{at}mlp.gate_proj", inner, hidden) if self._gated else None,
        )
