"""Experts in packed codes on the GPU step: memory is that of the codes, logits those of their numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.packed_weights import pack as pack_weights
from diptych.engine.backends.triton.products.experts import DenseExperts, PackedExpertProduct
from diptych.engine.gpu_precision import describe_matrices
from diptych.engine.models.shape import ExpertsShape, LayerShape, ModelShape
from diptych.engine.weights import Matrix, Weights
from kernels import packed_matrix
from kernels.packed_matrix import PackedMatrix, from_blocks, pack
from kernels.packed_stack import as_codes
from kernels.quantised_linear import BlockMatrix
from kernels.scaled_matrix import FP8, quantise
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.kernels.cpu.tiny_models import Pool, layout_of, shape_of, tokens_of, weights_of, with_matrices

CPU = torch.device("cpu")
Make = Callable[[torch.Tensor, int], Matrix]


def shape() -> ModelShape:
    """Return a shape as gpt-oss': experts with biases and the clamped gate, sinks, a window."""
    experts = ExpertsShape(5, 2, 64, routing="topk_then_softmax", router_bias=True, bias=True, clamp=0.9)
    layers = (LayerShape(9, experts=True), LayerShape(experts=True))
    return shape_of(
        max_context=256, vocab_size=67, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=32,
        experts=experts, layers=layers, activation="clamped_swiglu", sinks=True,
    )  # fmt: skip


def mxfp4(numbers: torch.Tensor, seed: int) -> Matrix:
    rows, columns = numbers.shape
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (rows, columns // 32, 17), generator=generator).to(torch.uint8)
    blocks[..., 0] = torch.randint(121, 125, blocks.shape[:2], generator=generator).to(torch.uint8)
    found = from_blocks(BlockMatrix("mxfp4", columns, blocks.flatten(1)))
    assert found is not None
    return found


def four_bits(numbers: torch.Tensor, seed: int, *, ordered: bool = False) -> Matrix:
    rows, columns = numbers.shape
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=generator).to(torch.uint8)
    scales = torch.rand(rows, columns // 32, generator=generator) * 0.05
    zeros = torch.randint(5, 11, scales.shape, generator=generator)
    of = (torch.arange(columns) // 32)[torch.randperm(columns, generator=generator)] if ordered else None
    found = pack("int4", codes, scales, 32, zeros=zeros, group_of=of)
    assert found is not None
    return found


KINDS: dict[str, tuple[Make, str]] = {
    "MXFP4": (mxfp4, "30 of experts in FP4 (E2M1), groups of 32"),
    "4 bits": (four_bits, "30 of experts in 4-bit codes, groups of 32"),
    "FP8": (lambda numbers, seed: quantise(numbers, FP8), "30 of experts in FP8, a scale for each output"),
}


def quantised(make: Make) -> tuple[Weights, Weights]:
    """Return float32 weights whose experts are packed, and the same with the numbers of their codes."""
    dense = weights_of(shape(), torch.float32)

    def of_experts(number: int, matrix: torch.Tensor) -> Any:
        return matrix if number < 100 else make(matrix, number)

    def numbers(number: int, matrix: Any) -> Any:
        return matrix if isinstance(matrix, torch.Tensor) else packed_matrix.dequantise(as_codes(matrix))

    packed = with_matrices(dense, of_experts)
    return packed, with_matrices(packed, numbers)


def distance(weights: Weights, plain: Weights, operators: Operators | None) -> float:
    """Return how far logits of a prompt and a step after it lie from those of the numbers."""
    ours, theirs = TritonBackend(shape(), weights, "cpu", operators), TorchBackend(shape(), plain)
    layout, found = layout_of(shape(), 16, torch.float32), []
    mine, other = Pool(layout, 4).sequence(40), Pool(layout, 4).sequence(40)
    for count in (19, 1):
        tokens = tokens_of(count, vocab_size=67, seed=count)
        got, expected = ours.forward([mine.step(tokens)], None), theirs.forward([other.step(tokens)], None)
        found.append(float((got - expected).abs().max()))
    return max(found)


@pytest.mark.parametrize("kind", ["MXFP4", "FP8"])
def test_logits_are_those_of_the_codes_numbers(kind: str) -> None:
    packed, plain = quantised(KINDS[kind][0])
    assert distance(packed, plain, REFERENCE_OPERATORS) < 2e-4

    def shifted(number: int, matrix: Any) -> Any:
        if isinstance(matrix, torch.Tensor):
            return matrix
        return replace(matrix, scales=matrix.scales.roll(1, 0 if kind == "FP8" else 1).contiguous())

    assert distance(with_matrices(packed, shifted), plain, REFERENCE_OPERATORS) > 0.01


def test_logits_are_those_of_the_codes_numbers_with_the_kernels() -> None:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    from kernels.gpu.launch import INTERPRETED

    if not INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 was not set before Triton was imported")
    assert distance(*quantised(mxfp4), None) < 2e-4


@pytest.mark.parametrize("kind", KINDS)
def test_experts_stay_in_their_codes_on_the_device_and_the_log_says_so(kind: str) -> None:
    make, described = KINDS[kind]
    packed, _ = quantised(make)
    assert describe_matrices(packed, CPU).endswith(described)
    for layer in pack_weights(packed, CPU).layers:
        assert layer.experts is not None
        for product in (layer.experts.gate_up, layer.experts.down):
            assert isinstance(product, PackedExpertProduct)
            assert product.nbytes < (1.5 if kind == "FP8" else 0.85) * product.weight.shape[0] * (
                product.weight.shape[1] * product.weight.shape[2]
            )


def test_experts_that_reorder_inputs_become_full_numbers_and_the_log_says_why() -> None:
    packed, plain = quantised(lambda numbers, seed: four_bits(numbers, seed, ordered=True))
    assert describe_matrices(packed, CPU).endswith(
        "30 of experts in bfloat16: inputs in an order of each matrix' own are not kept"
    )
    for layer, own in zip(pack_weights(packed, CPU).layers, plain.layers, strict=True):
        assert layer.experts is not None
        assert own.experts is not None
        assert isinstance(layer.experts.down, DenseExperts)
        expected = own.experts.downs[3]
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(layer.experts.down.weight[3], expected.bfloat16())
    matrix = packed.layers[0].experts
    assert matrix is not None
    assert isinstance(matrix.downs[0], PackedMatrix)
