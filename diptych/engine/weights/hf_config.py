"""From a Hugging Face `config.json` to a ModelShape. transformers resolves the defaults of each family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diptych.engine.models.shape import ModelShape, RopeScaling, UnsupportedModel

FAMILIES = ("llama", "mistral", "ministral", "qwen2", "qwen3")


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config with all defaults filled in. Raises UnsupportedModel if transformers cannot read
    it.
    """
    from transformers import AutoConfig  # a second of imports, which a GGUF file does not need

    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"no config.json in {folder}")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its checks of a config's fields raise kinds of their own
        raise UnsupportedModel(f"config.json cannot be read: {error}") from error
    resolved: dict[str, Any] = config.to_dict()
    return resolved


def eos_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """The stop tokens of the first source that names any (generation_config.json before config.json)."""
    for source in sources:
        value = source.get("eos_token_id")
        if value is not None:
            return tuple(int(i) for i in value) if isinstance(value, list) else (int(value),)
    return ()


def shape_from_config(config: Mapping[str, Any], *, tied: bool) -> ModelShape:
    """The shape that a resolved config describes. Raises UnsupportedModel, naming the field, for anything
    else.
    """
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        raise UnsupportedModel(f"model_type {family!r}: supported are {', '.join(FAMILIES)}")
    architectures = config.get("architectures")
    if architectures and not any(name.endswith("ForCausalLM") for name in architectures):
        raise UnsupportedModel(
            f"architectures {', '.join(architectures)}: only causal language models are run"
        )
    if not config.get("is_causal", True):
        raise UnsupportedModel("is_causal false: a token attends to those before it only")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {activation!r}: only silu is computed")
    heads, hidden, layers = (
        int(config[k]) for k in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    attention_bias = bool(config.get("attention_bias", False))
    rope = config.get("rope_parameters") or {}
    return ModelShape(
        family=family,
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        intermediate_size=int(config["intermediate_size"]),
        rms_eps=float(config["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        max_context=int(config["max_position_embeddings"]),
        rope_scaling=_rope_scaling(config, rope),
        tied_embeddings=tied,
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        windows=_windows(config, family, layers),
    )


def _windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if window is None or family == "llama":
        return ()
    if family == "mistral":
        return (int(window),) * layers
    if family != "ministral" and not config.get("use_sliding_window", False):
        return ()
    kinds = config.get("layer_types") or []
    if len(kinds) != layers:
        raise UnsupportedModel("layer_types does not name every layer")
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModel(f"layer_types: {', '.join(sorted(unknown))}")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _rope_scaling(config: Mapping[str, Any], rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", "default")
    if float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel("partial_rotary_factor: only whole heads are rotated")
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise UnsupportedModel(f"rope_type {kind!r}: supported are default, linear, llama3, yarn")
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise UnsupportedModel("rope mscale is not supported")
    given = rope.get("attention_factor")
    # Beside the scaling it counts more than within, as for transformers' models: Phi-3 began with that.
    beside, within = (one.get("original_max_position_embeddings") for one in (config, rope))
    return RopeScaling(
        kind=kind,
        factor=float(rope["factor"]),
        original_context=int(beside or within or config["max_position_embeddings"]),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=None if given is None else float(given),
        truncate=bool(rope.get("truncate", True)),
    )
