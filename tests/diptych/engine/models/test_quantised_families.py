"""Quantised folders of fused matrices, or of rows that are reordered: codes and numbers of the right rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from diptych.engine.models.rope import lane_order
from diptych.engine.weights.checkpoint import read_checkpoint
from kernels import byte_linear
from kernels.byte_codes import CodedBytes, as_bytes
from tests.diptych.engine.models.family_models import SIZES, oracle_of
from tests.diptych.engine.weights.quantised_folders import Writer, awq, fp8, gptq, write

EVEN = {"head_dim": 32, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SCHEMES: dict[str, tuple[dict[str, Any], Writer]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}, gptq()),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, awq()),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        fp8("weight_scale_inv", "rectangles"),
    ),
}
QUERIES, PAIRS, INNER = 128, 64, 128


def folder_of(model_type: str, path: Path) -> Path:
    """Save a random model of even sizes."""
    oracle_of(CONFIG_MAPPING[model_type](**{**SIZES, **EVEN, "hidden_size": 128})).save_pretrained(path)
    return path


def expected(model_type: str, numbers: Any, layer: int) -> dict[str, torch.Tensor]:
    """Return the canonical matrices of a layer by field, made of the file's by hand."""
    prefix = f"model.layers.{layer}."
    gate_up = numbers[f"{prefix}mlp.gate_up_proj"]
    found = {"gate": gate_up[:INNER], "up": gate_up[INNER:], "down": numbers[f"{prefix}mlp.down_proj"]}
    if model_type == "phi3":
        qkv = numbers[f"{prefix}self_attn.qkv_proj"]
        return {**found, "q": qkv[:QUERIES], "k": qkv[QUERIES:-PAIRS], "v": qkv[-PAIRS:]}
    order = lane_order(32, 16, interleaved=True)
    assert order is not None
    q, k, v = (numbers[f"{prefix}self_attn.{name}_proj"] for name in "qkv")
    heads = [one.view(-1, 32, 128)[:, order].flatten(0, 1) for one in (q, k)]
    return {**found, "q": heads[0], "k": heads[1], "v": v}


@pytest.mark.parametrize("model_type", ["phi3", "glm4"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers_are_those_of_the_rows(scheme: str, model_type: str, tmp_path: Path) -> None:
    numbers = write(folder_of(model_type, tmp_path), *SCHEMES[scheme])
    for index, layer in enumerate(read_checkpoint(tmp_path, "fp32").weights.layers):
        for field, matrix in expected(model_type, numbers, index).items():
            assert torch.equal(getattr(layer, field), matrix), field


@pytest.mark.parametrize("model_type", ["phi3", "glm4"])
@pytest.mark.parametrize("scheme", ["gptq", "awq"])
def test_codes_are_kept(scheme: str, model_type: str, tmp_path: Path) -> None:
    numbers = write(folder_of(model_type, tmp_path), *SCHEMES[scheme])
    for index, layer in enumerate(read_checkpoint(tmp_path, "int8").weights.layers):
        for field, matrix in expected(model_type, numbers, index).items():
            kept = getattr(layer, field)
            assert isinstance(kept, CodedBytes), field
            near = byte_linear.dequantise(as_bytes(kept))
            assert (near - matrix).abs().max() < 0.02 * matrix.abs().max(), field
