"""Fields and tensor names of layers of Mamba-2 that several families share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from diptych.engine.models.config_fields import unreadable
from diptych.engine.models.family import Config, Names, Stored
from diptych.engine.models.recurrent_shapes import SpaceShape
from diptych.engine.models.shape import UnsupportedModel

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


def mamba2_names(below: str) -> Names:
    """Return the places of a layer's tensors `below` its own."""
    return MappingProxyType(
        {
            "recurrent.in_proj": f"{below}in_proj.weight",
            "recurrent.in_proj_bias": f"{below}in_proj.bias",
            "recurrent.conv": f"{below}conv1d.weight",
            "recurrent.conv_bias": f"{below}conv1d.bias",
            "recurrent.decay": Stored(f"{below}A_log", float32=True),
            "recurrent.step_bias": Stored(f"{below}dt_bias", float32=True),
            "recurrent.skip": Stored(f"{below}D", float32=True),
            "recurrent.norm": f"{below}norm.weight",
            "recurrent.out_proj": f"{below}out_proj.weight",
            "recurrent.out_proj_bias": f"{below}out_proj.bias",
        }
    )


def mamba2_layer(config: Config, width: int, **switches: Any) -> SpaceShape:
    """Return a layer with channels of `width`, of the fields of `MAMBA2_DEFAULTS`; `switches` are fields of the
    shape. Raises UnsupportedModel, naming the field.
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
    """Return the shape of a layer with these fields. Raises UnsupportedModel for sizes that make no sense, and
    for bounds of steps, which are not computed.
    """
    shape = SpaceShape(**fields)
    sizes = (shape.heads, shape.head_dim, shape.groups, shape.state, shape.taps)
    if min(sizes) < 1 or shape.heads % shape.groups:
        raise unreadable(f"{shape.heads} heads of Mamba-2 in {shape.groups} groups, or another size below 1")
    _refuse_bounds(config.get("time_step_limit"))
    return shape


def _refuse_bounds(limit: Any) -> None:
    """Raise UnsupportedModel for bounds of steps that any step could meet: they are positive."""
    if limit is None:
        return
    bounds = [
        math.inf if one in (math.inf, {"__float__": "Infinity"}) else one
        for one in (limit if isinstance(limit, list | tuple) else [])
    ]
    if bounds != [0.0, math.inf]:
        raise UnsupportedModel(f"time_step_limit {limit!r}: steps have no bounds")
