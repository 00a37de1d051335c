"""Words on what a GPU multiplies in which numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diptych.engine.gpu_precision import describe_matrices
from diptych.engine.weights.canonical import ExpertWeights
from diptych.engine.weights.checkpoint import read_checkpoint
from tests.end_to_end import tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(("shared", "added"), [(True, 3), (False, 0)])
def test_a_shared_expert_counts_with_the_rest_and_routed_ones_apart(
    tmp_path: Path, shared: bool, added: int
) -> None:
    weights = read_checkpoint(tiny_model.write(tmp_path), "bf16").weights
    matrix = torch.zeros(2, 2, dtype=torch.bfloat16)
    some = dict.fromkeys(("shared_gate", "shared_up", "shared_down"), matrix if shared else None)
    experts = ExpertWeights(torch.zeros(2, 2), (matrix,) * 2, (matrix,) * 2, (matrix,) * 2, **some)
    layers = (*weights.layers[:-1], replace(weights.layers[-1], experts=experts))
    plain = int(describe_matrices(weights, CPU).split()[0])
    assert describe_matrices(replace(weights, layers=layers), CPU) == (
        f"{plain + added} in bfloat16; 6 of experts in bfloat16"
    )
