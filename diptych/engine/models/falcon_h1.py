"""Falcon-H1: attention and Mamba-2 side by side in every layer, and a factor for nearly every product.

Factors are multiplied into the matrices when these are read: `ModelShape.factors` has them by tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from diptych.engine.models.bamba import HYBRID_DEFAULTS, HYBRID_LAYER, HYBRID_MODEL
from diptych.engine.models.config_fields import llama_shape, unreadable
from diptych.engine.models.family import Config, Extent, Family, Names, Stored
from diptych.engine.models.mamba2_fields import expanded_width, mamba2_layer, mamba2_names
from diptych.engine.models.recurrent_shapes import SpaceShape
from diptych.engine.models.shape import LayerShape, ModelShape

_DEFAULTS = {
    **HYBRID_DEFAULTS,
    "max_position_embeddings": 8192,
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "projectors_bias": False,
    "lm_head_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "mlp_multipliers": None,
    "key_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "ssm_multipliers": None,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
}
_IN_PROJ = "recurrent.in_proj"


def _numbers(config: Config, field: str, count: int) -> list[float]:
    """Return a list of factors, ones where the config has none. Raises UnsupportedModel, naming the field."""
    given: Any = config[field]
    if given is None:
        return [1.0] * count
    if (
        not isinstance(given, list)
        or len(given) != count
        or not all(isinstance(one, int | float) and not isinstance(one, bool) for one in given)
    ):
        raise unreadable(f"{field} is {given!r}, not {count} numbers")
    return [float(one) for one in given]


def _mamba2(config: Config) -> SpaceShape:
    width = config["mamba_d_ssm"]
    norm: Literal["after_gate", "before_gate", "none"] = "none"
    if config["mamba_rms_norm"]:
        norm = "before_gate" if config["mamba_norm_before_gate"] else "after_gate"
    return mamba2_layer(config, expanded_width(config) if width is None else width, norm=norm)


def _factors(config: Config) -> dict[str, tuple[float, ...]]:
    """Return the factors of each tensor of a layer: one, or one for each of its stretches of rows."""
    into, key = config["attention_in_multiplier"], config["key_multiplier"]
    gate, down = _numbers(config, "mlp_multipliers", 2)
    stretches = [one * config["ssm_in_multiplier"] for one in _numbers(config, "ssm_multipliers", 5)]
    return {
        "q": (into,),
        "k": (into * key,),
        "v": (into,),
        "o": (config["attention_out_multiplier"],),
        "gate": (gate,),
        "down": (down,),
        _IN_PROJ: tuple(stretches),
        "recurrent.out_proj": (config["ssm_out_multiplier"],),
    }


def _shape(config: Config, tied: bool) -> ModelShape:
    shape = llama_shape(
        config,
        tied,
        embedding_scale=float(config["embedding_multiplier"]),
        logit_scale=float(config["lm_head_multiplier"]),
        factors=tuple(_factors(config).items()),
    )
    layer = LayerShape(recurrent=_mamba2(config))
    return replace(shape, layers=(layer,) * shape.num_layers)


def _multiplied(tensor: torch.Tensor, field: str, shape: ModelShape) -> torch.Tensor:
    """Return a matrix with its factors multiplied in."""
    factors = dict(shape.factors)[field]
    if len(factors) == 1:
        return tensor * factors[0]
    space = shape.layers[0].recurrent
    assert isinstance(space, SpaceShape)
    kept = space.groups * space.state
    widths = [space.width, space.width, kept, kept, space.heads]
    parts = zip(tensor.split(widths), factors, strict=True)
    return torch.cat([part * factor for part, factor in parts])


def _itself(_: str, extent: Extent, __: ModelShape) -> Extent:
    """Return the part of a file's matrix that the same part of the multiplied one is made of."""
    return extent


def _with_factors(names: Names, fields: Sequence[str]) -> Names:
    """Return `names` where these fields are made of what their tensors and factors give."""
    made = {
        field: Stored(
            str(names[field]),
            make=_multiplied,
            row_by_row=True,
            made_of=None if field == _IN_PROJ else _itself,
        )
        for field in fields
    }
    return {**names, **made}


FAMILIES = (
    Family(
        "falcon_h1",
        _DEFAULTS,
        _shape,
        layer=_with_factors(
            {**HYBRID_LAYER, **mamba2_names("mamba.")},
            ("q", "k", "v", "o", "gate", "down", _IN_PROJ, "recurrent.out_proj"),
        ),
        model=HYBRID_MODEL,
        neutral={
            "hidden_act": ("silu", "swish"),
            **dict.fromkeys(("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"), (False,)),
        },
    ),
)
