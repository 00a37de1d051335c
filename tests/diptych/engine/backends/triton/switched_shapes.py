"""Small shapes with each switch that the Triton step computes."""

from __future__ import annotations

from typing import Any

from diptych.engine.models.shape import ExpertsShape, LayerShape, ModelShape, QueryGrowth, Rotation
from tests.kernels.cpu.tiny_models import shape_of

_HEAD = 40
_BOTH = (LayerShape(experts=True), LayerShape(experts=True))
_CLAMPED = ExpertsShape(7, 3, 38, routing="topk_then_softmax", router_bias=True, bias=True, clamp=0.9)
_GROUPED = ExpertsShape(
    12,
    3,
    38,
    routing="sigmoid",
    normalise=True,
    scale=1.7,
    correction_bias=True,
    groups=4,
    groups_per_token=2,
    group_score="best_two",
    shared_size=170,
)
SWITCHES: dict[str, dict[str, Any]] = {
    "two rotations": {
        "rotations": (Rotation(1e4, _HEAD), Rotation(1e6, 20)),
        "layers": (LayerShape(19), LayerShape(None, 1)),
    },
    "no rotation": {"layers": (LayerShape(rotation=None), LayerShape())},
    "norms after": {"norms": "after"},
    "norms around": {"norms": "around"},
    "norms over the width": {"qk_norm": "width"},
    "norms after the rotation": {"qk_norm": "head", "qk_norm_after_rotation": True},
    "caps": {"score_cap": 1.5, "logit_cap": 4.0, "attention_scale": 0.23},
    "scales": {"embedding_scale": 3.1, "residual_scale": 0.6, "logit_scale": 0.7},
    "gelu": {"activation": "gelu", "mlp_bias": True},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "sinks": {"sinks": True, "windows": (9, None)},
    "growing queries": {"query_growth": QueryGrowth(0.4, 8)},
    "softmax experts": {"experts": ExpertsShape(7, 2, 38, normalise=True), "layers": _BOTH},
    "clamped experts": {
        "experts": _CLAMPED,
        "layers": (LayerShape(9, experts=True), LayerShape(experts=True)),
        "activation": "clamped_swiglu",
        "sinks": True,
    },
    "grouped experts after a dense layer": {
        "experts": _GROUPED,
        "layers": (LayerShape(), LayerShape(experts=True)),
    },
    "experts and one behind a switch": {
        "experts": ExpertsShape(5, 2, 38, shared_size=44, shared_gate=True),
        "layers": _BOTH,
    },
}
"""Fields of the shape, each with the name of what it tests."""


def switched(name: str, **sizes: Any) -> ModelShape:
    """Return the shape with the switch of that name, and other sizes."""
    return shape_of(**{**SWITCHES[name], **sizes})
