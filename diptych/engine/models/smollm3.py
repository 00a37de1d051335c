"""SmolLM3: Llama with layers that are not rotated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from diptych.engine.models.config_fields import COMMON, llama_shape, unreadable
from diptych.engine.models.family import Config, Family, GgufFamily, GgufMetadata
from diptych.engine.models.shape import LayerShape, ModelShape

_DEFAULTS = {
    **COMMON,
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "eos_token_id": 128001,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}
_EVERY = 4
"""Every so many-th layer is not rotated where the file does not say which."""


def _resolve(resolved: dict[str, Any]) -> None:
    step, count = resolved["no_rope_layer_interval"], resolved["num_hidden_layers"]
    rotated = resolved["no_rope_layers"]
    if rotated is None:
        rotated = [int(number % step != 0) for number in range(1, count + 1)]
    if not isinstance(rotated, list) or len(rotated) < count:
        raise unreadable("no_rope_layers does not name all layers")
    resolved["no_rope_layers"] = rotated
    if resolved["layer_types"] is None:
        windowed = resolved["use_sliding_window"] and resolved["sliding_window"] is not None
        resolved["layer_types"] = [
            "sliding_attention" if windowed and not rotates else "full_attention"
            for rotates in rotated[:count]
        ]


def _shape(config: Config, tied: bool) -> ModelShape:
    return _unrotated(llama_shape(config, tied), map(bool, config["no_rope_layers"]))


def _unrotated(shape: ModelShape, rotated: Iterable[bool]) -> ModelShape:
    layers = zip(shape.layers, rotated, strict=False)
    return replace(
        shape, layers=tuple(LayerShape(layer.window, 0 if rotates else None) for layer, rotates in layers)
    )


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    return _unrotated(shape, (number % _EVERY != 0 for number in range(1, shape.num_layers + 1)))


FAMILIES = (
    Family("smollm3", _DEFAULTS, _shape, rope_theta=2_000_000.0, window="layer_types", resolve=_resolve),
)
GGUF_FAMILIES = (GgufFamily("smollm3", _gguf, interleaved=True),)
