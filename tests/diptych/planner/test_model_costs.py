"""Bytes and operations of models whose sizes are known, and of mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.models.shape import ExpertsShape, LayerShape, ModelShape
from diptych.planner.model_costs import kv_bytes, model_costs
from diptych.planner.model_shape import NotPlanned, read_shape
from tests.diptych.planner.shapes import LLAMA_3_8B, LLAMA_3_70B, LLAMA_3_405B, LLAMA_7B, write_config


@pytest.mark.parametrize(
    ("config", "billions", "kv_kib"),
    [
        pytest.param(LLAMA_7B, 6.738, 512, id="7b"),
        pytest.param(LLAMA_3_8B, 8.030, 128, id="8b"),
        pytest.param(LLAMA_3_70B, 70.554, 320, id="70b"),
        pytest.param(LLAMA_3_405B, 405.853, 504, id="405b"),
    ],
)
def test_known_models_have_their_parameters_and_kv_bytes(
    tmp_path: Path, config: dict[str, Any], billions: float, kv_kib: int
) -> None:
    costs = model_costs(read_shape(write_config(tmp_path, config)))
    assert costs.parameters / 1e9 == pytest.approx(billions, abs=5e-4)
    assert costs.kv_bytes == kv_kib * 1024
    assert costs.weight_bytes == 2 * costs.parameters


def test_a_config_alone_and_its_folder_have_the_same_shape(tmp_path: Path) -> None:
    path = write_config(tmp_path, LLAMA_3_8B)
    assert read_shape(path) == read_shape(tmp_path)


def test_the_bundled_file_has_its_parameters() -> None:
    from diptych.runtime.settings import resolve_model

    costs = model_costs(read_shape(resolve_model("bundled")))
    assert costs.parameters == 134_515_008
    assert costs.kv_bytes == 2 * 30 * 3 * 64 * 2


def test_kv_bytes_in_int8_are_those_of_a_block() -> None:
    from diptych.runtime.settings import resolve_model

    shape = read_shape(resolve_model("bundled"))
    layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, 16, torch.int8)
    assert 16 * kv_bytes(shape, "int8") == layout.bytes_per_block
    assert kv_bytes(shape, "bf16") == model_costs(shape).kv_bytes


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotPlanned, match="rwkv"):
        read_shape(write_config(tmp_path, {"model_type": "rwkv"}))
    with pytest.raises(NotPlanned, match="cannot be read"):
        read_shape(tmp_path / "missing")
    (tmp_path / "text").write_text("text")
    with pytest.raises(NotPlanned, match="neither"):
        read_shape(tmp_path / "text")


def _mixtral(tmp_path: Path) -> ModelShape:
    """Return Mixtral 8x7B's shape: Llama's with eight experts of 14336."""
    config = {**LLAMA_7B, "num_key_value_heads": 8, "intermediate_size": 14336}
    dense = read_shape(write_config(tmp_path, config))
    experts = ExpertsShape(8, 2, 14336, normalise=True)
    return replace(dense, experts=experts, layers=tuple(LayerShape(experts=True) for _ in dense.layers))


def test_a_mixture_of_experts_counts_all_and_active_parameters(tmp_path: Path) -> None:
    costs = model_costs(_mixtral(tmp_path))
    assert costs.parameters / 1e9 == pytest.approx(46.703, abs=5e-4)
    assert costs.active_parameters / 1e9 == pytest.approx(12.748, abs=5e-3)
    assert costs.kv_bytes == 128 * 1024


def test_a_step_reads_the_experts_that_its_tokens_pick(tmp_path: Path) -> None:
    costs = model_costs(_mixtral(tmp_path))
    one, many = costs.step_bytes(1), costs.step_bytes(1000)
    assert one == pytest.approx(costs.dense_bytes + 2 * costs.expert_bytes)
    assert many == pytest.approx(costs.dense_bytes + 8 * costs.expert_bytes)
    assert one < costs.step_bytes(4) < many


def test_windowed_layers_attend_to_their_window(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, LLAMA_3_8B))
    half = tuple(LayerShape(window=1000 if number % 2 else None) for number in range(shape.num_layers))
    costs = model_costs(replace(shape, layers=half))
    assert costs.attended(500) == 500
    assert costs.attended(5000) == 3000


def test_fewer_bits_shrink_matrices_and_not_embeddings(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, LLAMA_3_8B))
    wide, narrow = model_costs(shape), model_costs(shape, "int4", "fp8")
    embedding = 128256 * 4096
    assert narrow.weight_bytes - 2 * embedding == pytest.approx(
        (wide.weight_bytes - 2 * embedding) * 4.25 / 16, rel=1e-3
    )
    assert narrow.kv_bytes == wide.kv_bytes / 2
    assert narrow.operands == "bf16"
