"""GGUF files of models with experts give the logits of their Hugging Face twins; blocks are kept."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from diptych.engine.loaded_model import load_model
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights.checkpoint import read_checkpoint
from kernels.quantised_linear import BlockMatrix
from tests.diptych.engine.models.expert_gguf import ARCHITECTURES, write
from tests.diptych.engine.models.expert_models import all_logits, oracle_logits, oracle_of, prompts

LONG = prompts()[-1] + prompts()[-2]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    oracle = oracle_of(name)
    write(oracle, tmp_path / "model.gguf", ARCHITECTURES[name])
    model = load_model(tmp_path / "model.gguf", torch.float32, backend="torch")
    torch.testing.assert_close(all_logits(model, LONG, 20), oracle_logits(oracle, LONG), atol=1e-4, rtol=0)


def test_experts_stay_in_the_blocks_of_their_file(tmp_path: Path) -> None:
    oracle = oracle_of("mixtral-wide")
    write(oracle, tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType.Q8_0)
    kept = read_checkpoint(tmp_path / "model.gguf", "gguf")
    plain = read_checkpoint(tmp_path / "model.gguf", "fp32")
    experts, numbers = kept.weights.layers[1].experts, plain.weights.layers[1].experts
    assert experts is not None
    assert numbers is not None
    assert experts.router.dtype == torch.float32
    for matrix, full in zip(experts.gates + experts.downs, numbers.gates + numbers.downs, strict=True):
        assert isinstance(matrix, BlockMatrix)
        assert matrix.format == "q8_0"
        assert tuple(matrix.shape) == tuple(full.shape)
    exact = all_logits(load_model(tmp_path / "model.gguf", torch.float32, backend="torch"), LONG, 20)
    for precision in ("gguf", "int8"):
        rounded = all_logits(load_model(tmp_path / "model.gguf", precision, backend="torch"), LONG, 20)
        # Rounding turns a choice of experts here and there: most rows are near.
        assert ((rounded - exact).norm(dim=1) / exact.norm(dim=1)).median() < 0.25


def test_another_gating_function_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(oracle_of("glm4_moe"), path, "glm4moe")
    data = bytearray(path.read_bytes())
    at = data.index(b"glm4moe.expert_gating_func") + len(b"glm4moe.expert_gating_func") + 4
    data[at] = 1
    path.write_bytes(data)
    with pytest.raises(UnsupportedModel, match="expert_gating_func: only sigmoids"):
        load_model(path, torch.float32, backend="torch")
