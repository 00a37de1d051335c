"""MXFP4 blocks are read as the numbers that transformers makes of them."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from diptych.engine.weights.canonical import BadModelFile
from diptych.engine.weights.quantised import scheme_of
from diptych.engine.weights.quantised.mxfp4 import numbers
from kernels.quantised_linear import dequantise
from tests.diptych.engine.weights.quantised_folders import Held


def random_blocks() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 5, 2, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(110, 140, (3, 5, 2), generator=generator).to(torch.uint8)
    return blocks, scales


def test_numbers_equal_those_of_transformers() -> None:
    blocks, scales = random_blocks()
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for expert in range(3):
        assert torch.equal(numbers(blocks[expert], scales[expert]).T, expected[expert])


def test_the_scheme_reads_one_expert_and_knows_its_parts() -> None:
    blocks, scales = random_blocks()
    scheme = scheme_of({"quantization_config": {"quant_method": "mxfp4"}})
    assert scheme is not None
    tensors = Held({"x_blocks": blocks[1], "x_scales": scales[1]})
    assert torch.equal(torch.as_tensor(scheme.read("x", tensors)), numbers(blocks[1], scales[1]).T)
    assert scheme.is_quantised("x", tensors)
    assert not scheme.is_quantised("y", tensors)
    assert scheme.matrix_of("a.gate_up_proj_scales") == "a.gate_up_proj"
    assert scheme.matrix_of("a.gate_up_proj_bias") is None


def test_blocks_are_kept_in_the_order_of_gguf_files() -> None:
    blocks, scales = random_blocks()
    scheme = scheme_of({"quantization_config": {"quant_method": "mxfp4"}})
    assert scheme is not None
    kept = scheme.read_blocks("x", Held({"x_blocks": blocks[1], "x_scales": scales[1]}))
    assert kept is not None
    assert kept.format == "mxfp4"
    assert torch.equal(dequantise(kept), numbers(blocks[1], scales[1]))
    assert torch.equal(dequantise(kept.rows(slice(1, None, 2))), numbers(blocks[1], scales[1])[1::2])


def test_blocks_without_their_scales_are_refused() -> None:
    blocks, scales = random_blocks()
    scheme = scheme_of({"quantization_config": {"quant_method": "mxfp4"}})
    assert scheme is not None
    with pytest.raises(BadModelFile, match="a byte for each"):
        scheme.read("x", Held({"x_blocks": blocks[1], "x_scales": scales[1, :3]}))
