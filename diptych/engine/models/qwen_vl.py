"""The text models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: those of Qwen2 and Qwen3, rotated by three positions.

Each pair of lanes turns by a token's time, height or width (arXiv:2409.12191, section 2.1). Qwen2-VL and
Qwen2.5-VL cut a head into three stretches of pairs; in Qwen3-VL the axes take turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from diptych.engine.models.config_fields import COMMON, llama_shape, unreadable
from diptych.engine.models.family import Config, Family, GgufFamily, GgufMetadata
from diptych.engine.models.qwen2 import QWEN2_DEFAULTS
from diptych.engine.models.shape import ModelShape, UnsupportedModel

_QWEN2_VL = {
    **QWEN2_DEFAULTS,
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "eos_token_id": 151645,
}
_QWEN3_VL = {
    **COMMON,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
}
_SECTIONS = (16, 24, 24)
_SECTIONS3 = (24, 20, 20)


def _resolve(resolved: dict[str, Any]) -> None:
    """Call a rotation that has nothing but sections by its kind: older files name it mrope."""
    for field in ("rope_scaling", "rope_parameters"):
        rope = resolved.get(field)
        if isinstance(rope, dict):
            kind = rope.get("rope_type", rope.get("type", "default"))
            resolved[field] = {**rope, "rope_type": "default" if kind == "mrope" else kind}


def _sections(config: Config, default: Sequence[int]) -> Sequence[int]:
    """Return how many pairs of lanes time, height and width turn. Raises UnsupportedModel."""
    rope: Mapping[str, Any] = config["rope_parameters"]
    given = rope.get("mrope_section", default)
    pairs = config["head_dim"] // 2
    whole = isinstance(given, list | tuple) and all(isinstance(one, int) and one >= 0 for one in given)
    if not whole or len(given) != len(_SECTIONS) or sum(given) != pairs:
        raise unreadable(f"mrope_section {given!r} does not cut {pairs} pairs of lanes into three")
    sections: Sequence[int] = given
    return sections


def _with_axes(shape: ModelShape, axes: Sequence[int]) -> ModelShape:
    return replace(shape, rotations=tuple(replace(one, axes=tuple(axes)) for one in shape.rotations))


def _shape(config: Config, tied: bool) -> ModelShape:
    sections = _sections(config, _SECTIONS)
    axes = [axis for axis, pairs in enumerate(sections) for _ in range(pairs)]
    return _with_axes(llama_shape(config, tied, qkv_bias=True), axes)


def _gguf(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    """Cut the pairs of lanes as the file says: its fourth section is for what no model of these has."""
    sections = _gguf_sections(metadata, shape, _SECTIONS)
    return _with_axes(shape, [axis for axis, count in enumerate(sections) for _ in range(count)])


def _gguf_sections(metadata: GgufMetadata, shape: ModelShape, default: Sequence[int]) -> Sequence[int]:
    key = "rope.dimension_sections"
    sections = metadata.integers(key) or (*default, 0)
    pairs = shape.rotations[0].width // 2
    if len(sections) != 4 or sections[3] or min(sections) < 0 or sum(sections) != pairs:
        raise UnsupportedModel(f"metadata {metadata.key(key)} does not cut {pairs} pairs of lanes into three")
    return sections[:3]


def _shape3(config: Config, tied: bool) -> ModelShape:
    axes = _interleaved(_sections(config, _SECTIONS3))
    return _with_axes(llama_shape(config, tied, qk_norm="head", deep_images=True), axes)


def _interleaved(sections: Sequence[int]) -> list[int]:
    """Return the axis of each pair of lanes where height and width take every third of the first ones."""
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[pair] = axis
    return axes


def _gguf3(metadata: GgufMetadata, shape: ModelShape) -> ModelShape:
    axes = _interleaved(_gguf_sections(metadata, shape, _SECTIONS3))
    return _with_axes(replace(shape, qk_norm="head", deep_images=True), axes)


def _family(name: str) -> Family:
    return Family(name, _QWEN2_VL, _shape, rope_theta=1e6, window="layer_types", resolve=_resolve)


FAMILIES = (
    _family("qwen2_vl_text"),
    _family("qwen2_5_vl_text"),
    Family("qwen3_vl_text", _QWEN3_VL, _shape3, rope_theta=500000.0, resolve=_resolve),
)

_SECTIONS_KEY = frozenset({"rope.dimension_sections"})
GGUF_FAMILIES = (
    GgufFamily("qwen2vl", _gguf, read=_SECTIONS_KEY),
    GgufFamily("qwen3vl", _gguf3, read=_SECTIONS_KEY),
)
