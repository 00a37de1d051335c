"""Quantised folders as their tools publish them, where they differ from what one would write oneself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.shape import UnsupportedModel
from engine.weights.checkpoint import read_checkpoint
from tests.engine.weights.quantised_folders import (
    Tensors,
    Writer,
    awq,
    change,
    declare,
    gptq,
    matrices,
    plain_folder,
    quantise,
)

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return plain_folder(tmp_path)


def write(
    folder: Path, quantization: Mapping[str, Any], writer: Writer, keep: tuple[str, ...] = ()
) -> Mapping[str, torch.Tensor]:
    """Quantise the folder; gives the numbers of each matrix."""
    declare(folder, quantization)
    numbers: Mapping[str, torch.Tensor] = change(folder, lambda tensors: quantise(tensors, writer, keep))
    return numbers


def every(part: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    """Edits this part of every matrix."""

    def apply(tensors: Tensors) -> None:
        tensors |= {name: edit(t).contiguous() for name, t in tensors.items() if name.endswith(f".{part}")}

    return apply


def check(folder: Path, numbers: Mapping[str, torch.Tensor]) -> None:
    read = matrices(folder, "fp32")
    assert read.keys() == numbers.keys()
    for name, matrix in read.items():
        assert torch.equal(matrix, numbers[name]), name


@pytest.mark.parametrize(
    ("said", "writer"),
    [
        ({"format": "gptq_v2"}, gptq(version=2)),
        ({"format": "gptq"}, gptq()),
        ({"format": "gptq", "checkpoint_format": "gptq_v2"}, gptq(version=2)),
        ({"dynamic": {}}, gptq()),
        ({"group_size": None}, gptq(group=-1)),
    ],
)
def test_gptq_s_fields_have_several_names(folder: Path, said: dict[str, Any], writer: Writer) -> None:
    check(folder, write(folder, {**GPTQ, **said}, writer))


def test_gptq_s_rules_may_leave_matrices_out(folder: Path) -> None:
    check(folder, write(folder, {**GPTQ, "dynamic": {"-:.*down": {}}}, gptq(), keep=("down",)))


def test_awq_s_layout_has_several_names(folder: Path) -> None:
    declare(folder, {"quant_method": "awq", "bits": 4, "group_size": 32, "format": "gemv"})
    with pytest.raises(UnsupportedModel, match="'gemv'"):
        read_checkpoint(folder, "fp32")
    said = {"quant_method": "awq", "bits": 4, "group_size": 32, "checkpoint_format": "GEMM"}
    check(folder, write(folder, said, awq()))
