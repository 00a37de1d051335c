"""Fields of a `config.json`: defaults, older spellings, types, and the shape that Llama's fields describe.

`resolve_config` gives every field its value: the file's own, else the default of its family, else one derived
from other fields. Rotary fields have two spellings that mean the same: `rope_scaling` beside `rope_theta`
(before transformers 5), and `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from diptych.engine.models.family import Config, Family
from diptych.engine.models.registry import family_of
from diptych.engine.models.rope import yarn_magnitude
from diptych.engine.models.shape import (
    Activation,
    LayerShape,
    ModelShape,
    RopeScaling,
    Rotation,
    UnsupportedModel,
    check_layer_count,
)
from diptych.model_families import WRAPPERS, text_model

COMMON: Mapping[str, object] = {
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
"""Defaults that most families share."""

_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "max_window_layers",
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
    *("moe_intermediate_size", "n_group", "topk_group", "first_k_dense_replace", "kv_lora_rank"),
    *("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_nextn_predict_layers"),
)
_TYPES: dict[str, type] = {
    **dict.fromkeys(_INTEGERS, int),
    "rms_norm_eps": float,
    "hidden_act": str,
    "attention_bias": bool,
    "mlp_bias": bool,
    "tie_word_embeddings": bool,
    "use_sliding_window": bool,
    "architectures": list,
    "layer_types": list,
    "rope_parameters": dict,
    "rope_scaling": dict,
}
# transformers refuses null for two of these in some families; here it is derived from other fields for all.
_NULLABLE = frozenset(
    {"num_key_value_heads", "head_dim", "sliding_window", "architectures", "layer_types"}
    | {"rope_parameters", "rope_scaling", "q_lora_rank", "n_group", "topk_group"}
    | {"num_experts_per_tok", "mamba_d_ssm"}
)
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_OLD_LAYER_TYPES = {"attention": "full_attention"}
_ROPE_FACTORS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
"""Kinds of rotary scaling that are computed, with the parameters that each must have."""
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu2": "relu2",
}


def resolve_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with every field that `shape_from_config` reads, rotary ones in `rope_parameters`.

    Raises UnsupportedModel, naming the field.
    """
    text = text_model(config)
    if text is None:
        raise unreadable(f"{config['model_type']} has no {WRAPPERS[config['model_type']]}")
    config, name = text, text.get("model_type")
    if name == "mistral" and "layer_types" in config:
        name = "ministral"  # the class with windows by layer; transformers reads such files so, too
    family = family_of(name)
    if config.get("per_layer_config") is not None:
        raise UnsupportedModel("per_layer_config: all layers are computed with one shape")
    _check_types(config, family)
    resolved = {**family.defaults, **config, "model_type": name}
    check_layer_count(resolved.get("num_hidden_layers", 0))
    if family.resolve is not None:
        family.resolve(resolved)
    _derive_heads(resolved, family)
    _derive_layer_types(resolved, family)
    resolved["rope_parameters"] = _rope_parameters(resolved, family)
    resolved.pop("rope_scaling", None)
    return resolved


def shape_from_config(config: Config, *, tied: bool) -> ModelShape:
    """Return the shape that a resolved config describes; `tied` says that the output matrix is the embedding.

    Raises UnsupportedModel, naming the field, for what is not computed.
    """
    family = family_of(config["model_type"])
    architectures = config.get("architectures")
    if architectures and not any(str(one).endswith("ForCausalLM") for one in architectures):
        raise UnsupportedModel(
            f"architectures {', '.join(map(str, architectures))}: only causal language models are run"
        )
    if not config.get("is_causal", True):
        raise UnsupportedModel("is_causal false: a token attends to those before it only")
    for field, values in family.neutral.items():
        if field in config and config[field] not in values:
            raise UnsupportedModel(f"{field} {config[field]!r} is not computed")
    return family.shape(config, tied)


def llama_shape(config: Config, tied: bool, **switches: Any) -> ModelShape:
    """Return the shape that the fields of Llama and its relatives describe; `switches` are fields of the
    shape that precede them.

    Raises UnsupportedModel, naming the field.
    """
    family = family_of(config["model_type"])
    layers, rotations = _layers(config, family)
    scaling = rotations[0].scaling
    context: int = config["max_position_embeddings"]
    fields: dict[str, Any] = {
        "family": family.name,
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "intermediate_size": config["intermediate_size"],
        "rms_eps": config.get("rms_norm_eps"),
        "max_context": context if scaling is None else scaling.stretched_context(context),
        "layers": layers,
        "rotations": rotations,
        "tied_embeddings": tied,
        "qkv_bias": config.get("attention_bias", False),
        "output_bias": config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
    }
    if "activation" not in switches:
        fields["activation"] = activation(config, "hidden_act")
    return ModelShape(**{**fields, **switches})


def activation(config: Config, field: str) -> Activation:
    """Return the activation that a config's field names. Raises UnsupportedModel, naming the field."""
    found = _ACTIVATIONS.get(str(config[field]))
    if found is None:
        raise UnsupportedModel(f"{field} {config[field]!r}: computed are {', '.join(_ACTIVATIONS)}")
    return found


def every_full(resolved: Config, step: int) -> list[str]:
    """Return the layer types of a model of whose layers every `step`-th has full attention, others windows.

    `sliding_window_pattern` in the config precedes `step`. Raises UnsupportedModel if it is no whole number.
    """
    given = resolved.get("sliding_window_pattern", step)
    if not isinstance(given, int) or given < 1:
        raise unreadable(f"sliding_window_pattern is {given!r}, not a number of layers")
    layers = range(1, resolved["num_hidden_layers"] + 1)
    return ["sliding_attention" if number % given else "full_attention" for number in layers]


def unreadable(why: str) -> UnsupportedModel:
    """Return the error of a config with a field that makes no sense."""
    return UnsupportedModel(f"config.json cannot be read: {why}")


def _check_types(config: Mapping[str, Any], family: Family) -> None:
    for field, value in config.items():
        kind = _TYPES.get(field)
        default = family.defaults.get(field)
        if kind is None and isinstance(default, bool | int | float | str) and field != "eos_token_id":
            kind = type(default)
        if kind is None or (value is None and (field in _NULLABLE or default is None)):
            continue
        whole = kind is float and isinstance(value, int) and field not in _TYPES
        if not (isinstance(value, kind) or whole) or (kind is not bool and isinstance(value, bool)):
            raise unreadable(f"{field} is {value!r}, not of type {kind.__name__}")
    eos = config.get("eos_token_id")
    for token in eos if isinstance(eos, list) else [0 if eos is None else eos]:
        if not isinstance(token, int) or isinstance(token, bool):
            raise unreadable(f"eos_token_id is {eos!r}, not a token id or a list of them")


def _derive_heads(resolved: dict[str, Any], family: Family) -> None:
    heads, hidden = resolved["num_attention_heads"], resolved["hidden_size"]
    if heads < 1:
        raise UnsupportedModel("num_attention_heads is below 1")
    if family.hidden_is_whole_heads and hidden % heads:
        raise unreadable(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    resolved["num_key_value_heads"] = resolved["num_key_value_heads"] or heads
    resolved["head_dim"] = resolved["head_dim"] or hidden // heads


def _derive_layer_types(resolved: dict[str, Any], family: Family) -> None:
    if "use_sliding_window" in family.defaults and not resolved["use_sliding_window"]:
        resolved["sliding_window"] = None
    kinds, layers = resolved.get("layer_types"), resolved["num_hidden_layers"]
    if kinds is None:
        if family.window == "layer_types" and resolved["sliding_window"] is not None:
            first = resolved["max_window_layers"] if "max_window_layers" in family.defaults else 0
            full = min(max(first, 0), layers)
            resolved["layer_types"] = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
        return
    kinds = [_OLD_LAYER_TYPES.get(str(kind), kind) for kind in kinds]
    resolved["layer_types"] = kinds
    unknown = sorted({str(kind) for kind in kinds} - _LAYER_TYPES - set(family.layer_kinds))
    if unknown:
        raise UnsupportedModel(f"layer_types: {', '.join(unknown)}")
    if len(kinds) != layers:
        raise unreadable(f"layer_types names {len(kinds)} of {layers} layers")


def _rope_parameters(resolved: Config, family: Family) -> dict[str, Any]:
    """Return the rotary fields of either spelling; a trained length beside it precedes one within.

    Families whose layers differ in them get a dictionary for each layer type.
    """
    if family.rope_by_layer_type is not None:
        by_type = family.rope_by_layer_type(resolved)
        return {kind: _rope_of_layers(rope, resolved, family) for kind, rope in by_type.items()}
    rope = dict(resolved.get("rope_scaling") or resolved.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedModel("rope_parameters by layer type: all layers are rotated alike")
    return _rope_of_layers(rope, resolved, family)


def _rope_of_layers(given: Mapping[str, Any], resolved: Config, family: Family) -> dict[str, Any]:
    rope = dict(given)
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", resolved.get("rope_theta", family.rope_theta))
    partial = rope.setdefault("partial_rotary_factor", resolved.get("partial_rotary_factor"))
    if partial not in (None, 1.0) and not family.partial_rotary:
        raise UnsupportedModel("partial_rotary_factor: only whole heads are rotated")
    beside, within = (one.get("original_max_position_embeddings") for one in (resolved, rope))
    rope["original_max_position_embeddings"] = beside or within or resolved["max_position_embeddings"]
    return rope


def _layers(config: Config, family: Family) -> tuple[tuple[LayerShape, ...], tuple[Rotation, ...]]:
    """Return the layers' records and the rotations that they choose from."""
    count, rope = config["num_hidden_layers"], config["rope_parameters"]
    windows = _windows(config, family) or (None,) * count
    if family.rope_by_layer_type is None:
        kinds = config.get("layer_types") or (None,) * count
        own = {kind: make(config) for kind, make in family.layer_kinds.items()}
        found = (own.get(kind, LayerShape(window)) for window, kind in zip(windows, kinds, strict=True))
        return tuple(found), (rotation_of(rope, config),)
    kinds = sorted(set(config["layer_types"]))
    rotations = tuple(rotation_of(rope[kind], config) for kind in kinds)
    chosen = (kinds.index(kind) for kind in config["layer_types"])
    layers = tuple(LayerShape(window, number) for window, number in zip(windows, chosen, strict=True))
    return layers, rotations


def _windows(config: Config, family: Family) -> tuple[int | None, ...]:
    window: int | None = config.get("sliding_window")
    if window is None or family.window == "none":
        return ()
    if family.window == "every_layer":
        return (window,) * int(config["num_hidden_layers"])
    return tuple(window if kind == "sliding_attention" else None for kind in config["layer_types"])


def rotation_of(rope: Mapping[str, Any], config: Config) -> Rotation:
    """Return the rotation that rotary fields describe. Raises UnsupportedModel, naming the field."""
    try:
        partial = rope["partial_rotary_factor"]
        width = int(config["head_dim"] * (1.0 if partial is None else float(partial)))
        return Rotation(float(rope["rope_theta"]), width, _rope_scaling(rope, config))
    except UnsupportedModel:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise UnsupportedModel(f"rope_parameters: {error}") from error


def _rope_scaling(rope: Mapping[str, Any], config: Config) -> RopeScaling | None:
    kind = rope["rope_type"]
    if kind not in _ROPE_FACTORS:
        raise UnsupportedModel(f"rope_type {kind!r}: supported are {', '.join(_ROPE_FACTORS)}")
    if kind == "default":
        return None
    missing = [name for name in _ROPE_FACTORS[kind] if rope.get(name) is None]
    if missing:
        raise unreadable(f"rope_parameters of rope_type {kind} lack {', '.join(missing)}")
    if kind == "longrope":
        return _longrope(rope, config)
    given = rope.get("attention_factor")
    if given is None and kind == "yarn" and rope.get("mscale") and rope.get("mscale_all_dim"):
        sharp, all_dims = (
            yarn_magnitude(float(rope["factor"]), float(rope[name])) for name in ("mscale", "mscale_all_dim")
        )
        given = sharp / all_dims
    return RopeScaling(
        kind=kind,
        factor=float(rope["factor"]),
        original_context=int(rope["original_max_position_embeddings"]),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=None if given is None else float(given),
        truncate=bool(rope.get("truncate", True)),
    )


def _longrope(rope: Mapping[str, Any], config: Config) -> RopeScaling:
    original = int(rope["original_max_position_embeddings"])
    factor = float(rope.get("factor") or config["max_position_embeddings"] / original)
    sharper = rope.get("attention_factor")
    if sharper is None:
        sharper = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    short, long = (tuple(map(float, rope[name])) for name in ("short_factor", "long_factor"))
    pairs = int(config["head_dim"] * float(rope["partial_rotary_factor"] or 1.0)) // 2
    if len(short) != pairs or len(long) != pairs:
        raise unreadable(
            f"rope_parameters have {len(short)} and {len(long)} factors for {pairs} pairs of lanes"
        )
    return RopeScaling(
        "longrope", factor, original, attention_factor=float(sharper), factors=short, long_factors=long
    )
