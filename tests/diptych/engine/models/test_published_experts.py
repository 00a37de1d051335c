"""Published configs of models with experts: their parameters, those of a token, and what a token keeps."""

from __future__ import annotations

import pytest

from diptych.engine.models.config_fields import resolve_config, shape_from_config
from diptych.engine.models.shape import ModelShape
from diptych.planner.model_costs import model_costs
from tests.diptych.engine.models.published_experts import PUBLISHED

# Name: parameters, as the cards and safetensors' headers count them; billions a token; numbers a token keeps.
SIZES = {
    "Qwen3-30B-A3B": (30_532_122_624, 3.3, 48 * 2 * 4 * 128),
    "Mixtral-8x7B": (46_702_792_704, 12.9, 32 * 2 * 8 * 128),
    "OLMoE-1B-7B": (6_919_161_856, 1.3, 16 * 2 * 16 * 128),
    "gpt-oss-20b": (20_914_757_184, 3.6, 24 * 2 * 8 * 64),
    "GLM-4.5-Air": (
        106_852_245_504 + 45 * 128,
        12.0,  # whose correction biases are counted here
        46 * 2 * 8 * 128,
    ),
    "DeepSeek-V2-Lite": (15_706_484_224, 2.7, 27 * 576),
    "DeepSeek-V3": (671_026_419_200, 37.6, 61 * 576),
}


def read(name: str) -> ModelShape:
    return shape_from_config(resolve_config(PUBLISHED[name]), tied=False)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_parameters(name: str) -> None:
    parameters, active, kept = SIZES[name]
    costs = model_costs(read(name))
    assert costs.parameters == parameters
    assert costs.active_parameters / 1e9 == pytest.approx(active, rel=0.12)
    assert costs.kv_bytes == 2 * kept


def test_deepseek_scores_are_scaled_for_the_long_context() -> None:
    shape = read("DeepSeek-V3")
    assert shape.max_context == 163840
    assert shape.score_scale == pytest.approx(192**-0.5 * (0.1 * 3.68888 + 1) ** 2, rel=1e-5)
    scaling = shape.rotations[0].scaling
    assert scaling is not None
    assert scaling.attention_factor == pytest.approx(1.0)


def test_gpt_oss_windows_every_second_layer() -> None:
    assert read("gpt-oss-20b").windows == (128, None) * 12
