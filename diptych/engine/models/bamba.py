"""Bamba: Mamba-2 in most layers, attention with half of each head rotated in some."""

from __future__ import annotations

from typing import Any

from diptych.engine.models.config_fields import llama_shape, unreadable
from diptych.engine.models.family import LLAMA_LAYER, LLAMA_MODEL, Config, Family, Names
from diptych.engine.models.mamba2_fields import MAMBA2_DEFAULTS, mamba2_alone, mamba2_names
from diptych.engine.models.shape import ModelShape

HYBRID_DEFAULTS = {
    **MAMBA2_DEFAULTS,
    "vocab_size": 128000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
"""Defaults of Bamba and Falcon-H1."""
_DEFAULTS = {**HYBRID_DEFAULTS, "max_position_embeddings": 262_144, "attn_layer_indices": None}
HYBRID_LAYER: Names = {
    **{field: str(at).replace("mlp.", "feed_forward.") for field, at in LLAMA_LAYER.items()},
    "post_norm": "pre_ff_layernorm.weight",
}
"""Places of tensors of Bamba, Falcon-H1 and Jamba that are no recurrence's."""
HYBRID_MODEL: Names = {**LLAMA_MODEL, "final_norm": "model.final_layernorm.weight"}


def _resolve(resolved: dict[str, Any]) -> None:
    """Fill in the layers' kinds, and the half of a head that is rotated whatever the config says."""
    resolved["partial_rotary_factor"] = 0.5
    given = resolved["attn_layer_indices"]
    if given is not None and not (isinstance(given, list) and all(isinstance(one, int) for one in given)):
        raise unreadable(f"attn_layer_indices is {given!r}, not a list of layers")
    attends = set(given or ())
    resolved["layer_types"] = [
        "full_attention" if layer in attends else "linear_attention"
        for layer in range(resolved["num_hidden_layers"])
    ]


def _shape(config: Config, tied: bool) -> ModelShape:
    return llama_shape(config, tied)


FAMILIES = (
    Family(
        "bamba",
        _DEFAULTS,
        _shape,
        layer={**HYBRID_LAYER, **mamba2_names("mamba.")},
        model=HYBRID_MODEL,
        resolve=_resolve,
        layer_kinds={"linear_attention": mamba2_alone},
        neutral={"hidden_act": ("silu", "swish")},
        partial_rotary=True,
    ),
)
