"""Models of each group of families through both workers: greedy outputs in random order are those of the
model alone, whatever is prefilled in one worker and decoded in the other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from diptych.engine.models.shape import LayerShape, QueryGrowth, Rotation
from tests.diptych.worker_process import both_workers, test_random_interleavings
from tests.diptych.worker_process.both_workers import house
from tests.diptych.worker_process.complaints import complaints

WINDOWED, FULL, UNROTATED = LayerShape(7), LayerShape(), LayerShape(rotation=None)
GROUPS: dict[str, dict[str, Any]] = {
    "norms around, caps, two rotations": {
        "norms": "around",
        "score_cap": 2.0,
        "logit_cap": 3.0,
        "activation": "gelu_tanh",
        "embedding_scale": 4.0,
        "qk_norm": "head",
        "layers": (LayerShape(7, 1), FULL),
        "rotations": (Rotation(1e6, 8), Rotation(1e4, 8)),
    },
    "norms after, over the width": {"norms": "after", "qk_norm": "width", "layers": (WINDOWED, FULL)},
    "LayerNorm, parallel": {
        "norm": "layer",
        "parallel_residual": True,
        "logit_scale": 0.25,
        "layers": (WINDOWED, UNROTATED),
    },
    "LayerNorm with bias, no gate": {"norm": "layer", "norm_bias": True, "gated": False, "mlp_bias": True},
    "growth, norms after the rotation": {
        "query_growth": QueryGrowth(0.5, 9),
        "qk_norm": "head",
        "qk_norm_after_rotation": True,
        "rotations": (Rotation(1e4, 4),),
    },
    "scales": {"attention_scale": 0.3, "embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 0.5},
}


@pytest.fixture(params=GROUPS)
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give both workers a model of a group."""
    monkeypatch.setattr(both_workers, "SHAPE", replace(both_workers.SHAPE, **GROUPS[request.param]))
    for cached in (both_workers.model, both_workers.greedy):
        cached.cache_clear()
    yield request.param
    for cached in (both_workers.model, both_workers.greedy):
        cached.cache_clear()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
async def test_greedy_outputs_are_those_of_the_model_alone(
    transport: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(test_random_interleavings, "REQUESTS", 24)
    async with house(transport, decodes=2, prefills=2, blocks=20) as made:
        await test_random_interleavings.Walk(made, 3).run()
        assert await made.empty() == []
    assert complaints(caplog) == []
