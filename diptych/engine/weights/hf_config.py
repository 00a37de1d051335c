"""Reader of a Hugging Face folder's `config.json`: defaults, older spellings, and the ModelShape.

`read_config` gives every field its value: the file's own, else the default of its family
(diptych/engine/models/families.py), else one derived from other fields. Rotary fields have two spellings that
mean the same: `rope_scaling` beside `rope_theta` (before transformers 5), and `rope_parameters`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diptych.engine.models.families import FAMILIES, Family
from diptych.engine.models.shape import ModelShape, RopeScaling, UnsupportedModel

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
    | {"rope_parameters", "rope_scaling"}
)
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_OLD_LAYER_TYPES = {"attention": "full_attention"}
_ROPE_FACTORS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Kinds of rotary scaling that are computed, with the parameters that each must have."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return the fields of the folder's `config.json`, defaults filled in.

    Raises FileNotFoundError, and UnsupportedModel, naming the field, for no config of a known family.
    """
    path = folder / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"no config.json in {folder}")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise _unreadable(str(error)) from error
    if not isinstance(config, dict):
        raise _unreadable("it is not an object")
    return resolve_config(config)


def resolve_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with every field that `shape_from_config` reads, rotary ones in `rope_parameters`.

    Raises UnsupportedModel, naming the field.
    """
    name = config.get("model_type")
    if name == "mistral" and "layer_types" in config:
        name = "ministral"  # the class with windows by layer; transformers reads such files so, too
    family = FAMILIES.get(str(name))
    if family is None:
        raise UnsupportedModel(f"model_type {name!r}: supported are {', '.join(FAMILIES)}")
    if config.get("per_layer_config") is not None:
        raise UnsupportedModel("per_layer_config: all layers are computed with one shape")
    _check_types(config)
    resolved = {**family.defaults, **config, "model_type": name}
    _derive_heads(resolved, family)
    _derive_layer_types(resolved, family)
    resolved["rope_parameters"] = _rope_parameters(config, resolved, family)
    resolved.pop("rope_scaling", None)
    return resolved


def shape_from_config(config: Mapping[str, Any], *, tied: bool) -> ModelShape:
    """Return the shape that a resolved config describes; `tied` says that the output matrix is the embedding.

    Raises UnsupportedModel, naming the field, for what is not computed.
    """
    name = str(config["model_type"])
    family = FAMILIES[name]
    architectures = config.get("architectures")
    if architectures and not any(str(one).endswith("ForCausalLM") for one in architectures):
        raise UnsupportedModel(
            f"architectures {', '.join(map(str, architectures))}: only causal language models are run"
        )
    if not config.get("is_causal", True):
        raise UnsupportedModel("is_causal false: a token attends to those before it only")
    if config["hidden_act"] not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {config['hidden_act']!r}: only silu is computed")
    rope = config["rope_parameters"]
    try:
        theta, scaling = float(rope["rope_theta"]), _rope_scaling(rope)
    except UnsupportedModel:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise UnsupportedModel(f"rope_parameters: {error}") from error
    context: int = config["max_position_embeddings"]
    return ModelShape(
        family=name,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate_size=config["intermediate_size"],
        rms_eps=config["rms_norm_eps"],
        rope_theta=theta,
        max_context=context if scaling is None else scaling.stretched_context(context),
        rope_scaling=scaling,
        tied_embeddings=tied,
        qkv_bias=config["attention_bias"] or family.qkv_bias,
        output_bias=config["attention_bias"],
        mlp_bias=config["mlp_bias"],
        qk_norm=family.qk_norm,
        windows=_windows(config, family),
    )


def _unreadable(why: str) -> UnsupportedModel:
    return UnsupportedModel(f"config.json cannot be read: {why}")


def _check_types(config: Mapping[str, Any]) -> None:
    for field, kind in _TYPES.items():
        value = config.get(field)
        if field not in config or (value is None and field in _NULLABLE):
            continue
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise _unreadable(f"{field} is {value!r}, not of type {kind.__name__}")
    eos = config.get("eos_token_id")
    for token in eos if isinstance(eos, list) else [0 if eos is None else eos]:
        if not isinstance(token, int) or isinstance(token, bool):
            raise _unreadable(f"eos_token_id is {eos!r}, not a token id or a list of them")


def _derive_heads(resolved: dict[str, Any], family: Family) -> None:
    heads, hidden = resolved["num_attention_heads"], resolved["hidden_size"]
    if heads < 1:
        raise UnsupportedModel("num_attention_heads is below 1")
    if family.hidden_is_whole_heads and hidden % heads:
        raise _unreadable(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    resolved["num_key_value_heads"] = resolved["num_key_value_heads"] or heads
    resolved["head_dim"] = resolved["head_dim"] or hidden // heads


def _derive_layer_types(resolved: dict[str, Any], family: Family) -> None:
    if "use_sliding_window" in family.defaults and not resolved["use_sliding_window"]:
        resolved["sliding_window"] = None
    kinds, layers = resolved["layer_types"], resolved["num_hidden_layers"]
    if kinds is None:
        if family.window == "layer_types" and resolved["sliding_window"] is not None:
            first = resolved["max_window_layers"] if "max_window_layers" in family.defaults else 0
            full = min(max(first, 0), layers)
            resolved["layer_types"] = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
        return
    kinds = [_OLD_LAYER_TYPES.get(str(kind), kind) for kind in kinds]
    resolved["layer_types"] = kinds
    unknown = sorted({str(kind) for kind in kinds} - _LAYER_TYPES)
    if unknown:
        raise UnsupportedModel(f"layer_types: {', '.join(unknown)}")
    if len(kinds) != layers:
        raise _unreadable(f"layer_types names {len(kinds)} of {layers} layers")


def _rope_parameters(
    config: Mapping[str, Any], resolved: Mapping[str, Any], family: Family
) -> dict[str, Any]:
    """Return the rotary fields of either spelling; a trained length beside it precedes one within."""
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedModel("rope_parameters by layer type: all layers are rotated alike")
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", family.rope_theta))
    rope.setdefault("partial_rotary_factor", config.get("partial_rotary_factor"))
    beside, within = (one.get("original_max_position_embeddings") for one in (config, rope))
    rope["original_max_position_embeddings"] = beside or within or resolved["max_position_embeddings"]
    return rope


def _windows(config: Mapping[str, Any], family: Family) -> tuple[int | None, ...]:
    window: int | None = config["sliding_window"]
    if window is None or family.window == "none":
        return ()
    if family.window == "every_layer":
        return (window,) * int(config["num_hidden_layers"])
    return tuple(window if kind == "sliding_attention" else None for kind in config["layer_types"])


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind, partial = rope["rope_type"], rope["partial_rotary_factor"]
    if partial is not None and partial != 1.0:
        raise UnsupportedModel("partial_rotary_factor: only whole heads are rotated")
    if kind not in _ROPE_FACTORS:
        raise UnsupportedModel(f"rope_type {kind!r}: supported are {', '.join(_ROPE_FACTORS)}")
    if kind == "default":
        return None
    missing = [name for name in _ROPE_FACTORS[kind] if rope.get(name) is None]
    if missing:
        raise _unreadable(f"rope_parameters of rope_type {kind} lack {', '.join(missing)}")
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise UnsupportedModel("rope mscale is not supported")
    given = rope.get("attention_factor")
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
