"""Fields and tensor names of layers of Mamba and Mamba-2 that several families share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from diptych.engine.models.config_fields import unreadable
from diptych.engine.models.family import Config, Names, Stored
from diptych.engine.models.recurrent_shapes import SpaceShape
from diptych.engine.models.shape import LayerShape

MAMBA2_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }
)
"""Defaults of Granite 4 H, Bamba and Falcon-H1; `mamba_d_head` is the share of a head where it is "auto"."""


def mamba_names(below: str) -> Names:
    """Return the places of tensors that layers of Mamba and Mamba-2 have, `below` a layer's own."""
    return MappingProxyType(
        {
            "recurrent.in_proj": f"{below}in_proj.weight",
            "recurrent.in_proj_bias": f"{below}in_proj.bias",
            "recurrent.conv": f"{below}conv1d.weight",
            "recurrent.conv_bias": f"{below}conv1d.bias",
            "recurrent.decay": Stored(f"{below}A_log", float32=True),
            "recurrent.skip": Stored(f"{below}D", float32=True),
            "recurrent.out_proj": f"{below}out_proj.weight",
            "recurrent.out_proj_bias": f"{below}out_proj.bias",
        }
    )


def mamba2_names(below: str) -> Names:
    """Return the places of the tensors of a layer of Mamba-2, `below` its own."""
    return MappingProxyType(
        {
            **mamba_names(below),
            "recurrent.step_bias": Stored(f"{below}dt_bias", float32=True),
            "recurrent.norm": f"{below}norm.weight",
        }
    )


def expanded_width(config: Config) -> int:
    """Return the channels of a layer of Mamba or Mamba-2: a multiple of the residual's."""
    width: int = config["mamba_expand"] * config["hidden_size"]
    return width


def mamba2_alone(config: Config) -> LayerShape:
    """Return a layer of Mamba-2 in place of attention. Raises UnsupportedModel, naming the field."""
    return LayerShape(attention=False, recurrent=mamba2_layer(config, expanded_width(config)))


def mamba2_layer(config: Config, width: int, **switches: Any) -> SpaceShape:
    """Return a layer with channels of `width`, of the fields of `MAMBA2_DEFAULTS`; `switches` are fields of
    the shape. Raises UnsupportedModel, naming the field.
    """
    heads, given = config["mamba_n_heads"], config.get("mamba_d_head", "auto")
    head_dim = width // max(heads, 1) if given == "auto" else given
    if not isinstance(head_dim, int) or heads < 1 or head_dim * heads != width:
        raise unreadable(f"mamba_n_heads {heads} and mamba_d_head {given!r} do not make {width} channels")
    bias: bool = config["mamba_proj_bias"]
    return space_shape(
        config,
        heads=heads,
        head_dim=head_dim,
        groups=config["mamba_n_groups"],
        state=config["mamba_d_state"],
        taps=config["mamba_d_conv"],
        conv_bias=config["mamba_conv_bias"],
        **{"in_bias": bias, "out_bias": bias, **switches},
    )


def space_shape(config: Config, **fields: Any) -> SpaceShape:
    """Return the shape of a layer with these fields, and with the config's bounds of steps.

    transformers bounds the steps of a text that is computed at once, and not those of single tokens: here all
    are bounded. Raises UnsupportedModel for sizes or bounds that make no sense.
    """
    shape = SpaceShape(**{"step_bounds": _bounds(config.get("time_step_limit")), **fields})
    sizes = (shape.heads, shape.head_dim, shape.groups, shape.state, shape.taps)
    if min(sizes) < 1 or shape.heads % shape.groups:
        raise unreadable(f"{shape.heads} heads of Mamba-2 in {shape.groups} groups, or another size below 1")
    return shape


def _bounds(limit: Any) -> tuple[float, float]:
    """Return the bounds of steps that a config gives. Raises UnsupportedModel, naming the field."""
    if limit is None:
        return 0.0, math.inf
    given = limit if isinstance(limit, list | tuple) else ()
    bounds = [math.inf if one == {"__float__": "Infinity"} else one for one in given]
    numbers = [one for one in bounds if isinstance(one, int | float) and not isinstance(one, bool)]
    if len(bounds) != 2 or len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1]:
        raise unreadable(f"time_step_limit is {limit!r}, not two bounds of steps")
    return float(numbers[0]), float(numbers[1])
