"""Model families by the `model_type` of their `config.json`: defaults of its fields, switches of the layers.

To add a family, add a row to `FAMILIES`. tests/diptych/engine/weights/test_hf_config.py compares every row
with what transformers' configuration class of that name gives for the same files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """Defaults of one family's `config.json`, and what its layers have without a field that says so."""

    defaults: Mapping[str, object]
    """Value of a field that a file leaves out. None is derived from other fields (hf_config.py)."""
    rope_theta: float = 10000.0
    qkv_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each head of queries and keys."""
    window: Literal["none", "every_layer", "layer_types"] = "none"
    """Layers to which `sliding_window` applies. Where `use_sliding_window` has a default, it must be true."""
    hidden_is_whole_heads: bool = False
    """A `hidden_size` that is no multiple of `num_attention_heads` is refused, even beside a `head_dim`."""


_COMMON = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "sliding_window": None,
    "layer_types": None,
}
_LLAMA = {
    **_COMMON,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}
_MISTRAL = {
    **_COMMON,
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "eos_token_id": 2,
    "sliding_window": 4096,
}
_QWEN2 = {
    **_COMMON,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILIES: dict[str, Family] = {
    "llama": Family(_LLAMA, hidden_is_whole_heads=True),
    "mistral": Family(_MISTRAL, window="every_layer"),
    "ministral": Family(_MISTRAL, window="layer_types"),
    "qwen2": Family(_QWEN2, qkv_bias=True, window="layer_types"),
    "qwen3": Family({**_QWEN2, "head_dim": 128}, qk_norm=True, window="layer_types"),
}
