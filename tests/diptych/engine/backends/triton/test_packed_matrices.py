"""Quantised files on the GPU step: codes are kept, and the text is that of their dequantised weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.products import packed
from diptych.engine.gpu_precision import describe_matrices, packs_on_gpu
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights import LayerWeights, Weights
from diptych.engine.weights.checkpoint import read_checkpoint
from kernels.kquants import KQUANT_BYTES
from kernels.packed_matrix import PackedMatrix, dequantise, from_blocks
from kernels.quantised_linear import BlockFormat, BlockMatrix
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.diptych.engine.weights.quantised_folders import matrices, plain_folder, write
from tests.diptych.engine.weights.test_quantised_folders import KINDS
from tests.kernels.cpu.tiny_models import (
    Pool,
    layout_of,
    random_blocks,
    shape_of,
    tokens_of,
    weights_of,
    with_matrices,
)
from tests.kernels.kquant_blocks import random_blocks as kquant_blocks
from tests.kernels.test_packed_matrix import drawn

PACKED = [name for name in KINDS if "fp8" not in name and "float8" not in name]
MOST_KL = 0.002


@pytest.mark.parametrize("kind", PACKED)
def test_codes_of_folders_are_kept_and_stand_for_their_numbers(tmp_path: Path, kind: str) -> None:
    numbers = write(plain_folder(tmp_path), *KINDS[kind])
    assert packs_on_gpu(tmp_path)
    for name, matrix in matrices(tmp_path, "packed").items():
        assert isinstance(matrix, PackedMatrix)
        assert torch.equal(dequantise(matrix), numbers[name]), name
    described = describe_matrices(read_checkpoint(tmp_path, "packed").weights, torch.device("cpu"))
    assert ("8-bit" if "8" in kind or "eight" in kind else "4-bit") in described
    assert described.endswith("1 in bfloat16"), "the output matrix"


def changed(weights: Weights, change: Callable[[PackedMatrix], object]) -> Weights:
    """Return `weights` with every packed matrix replaced."""

    def of_layer(layer: LayerWeights) -> LayerWeights:
        own = {field.name: getattr(layer, field.name) for field in fields(layer)}
        packed_ones = {name: change(value) for name, value in own.items() if isinstance(value, PackedMatrix)}
        return replace(layer, **packed_ones)

    head = change(weights.head) if isinstance(weights.head, PackedMatrix) else weights.head
    return replace(weights, layers=tuple(map(of_layer, weights.layers)), head=head)


def in_float32(weights: Weights, plain: Weights) -> Weights:
    """Return the packed matrices of `weights`, everything else as in `plain`."""
    layers = []
    for own, layer in zip(weights.layers, plain.layers, strict=True):
        kept = {field.name: getattr(own, field.name) for field in fields(own)}
        layers.append(replace(layer, **{n: m for n, m in kept.items() if isinstance(m, PackedMatrix)}))
    return replace(plain, layers=tuple(layers))


def compare(shape: ModelShape, weights: Weights, operators: Operators | None, steps: int = 6) -> float:
    """Greedy steps with the packed weights and with their numbers; returns the greatest KL of a step.

    Both follow the text of the numbers.
    """
    ours = TritonBackend(shape, weights, "cpu", operators)
    theirs = TorchBackend(shape, changed(weights, dequantise))
    layout = layout_of(shape, 16, torch.float32)
    mine, other = Pool(layout, 6).sequence(60), Pool(layout, 6).sequence(60)
    tokens, worst = tokens_of(20, vocab_size=shape.vocab_size), 0.0
    for _ in range(steps):
        got = ours.forward([mine.step(tokens)], None)
        expected = theirs.forward([other.step(tokens)], None)
        logs = expected.log_softmax(-1)
        worst = max(worst, float((logs.exp() * (logs - got.log_softmax(-1))).sum()))
        if got.argmax() != expected.argmax():
            return float("inf")
        tokens = [int(expected.argmax())]
    return worst


@pytest.mark.parametrize("kind", ["gptq, ordered", "awq", "nf4 with nested peaks"])
def test_text_is_that_of_the_dequantised_weights(tmp_path: Path, kind: str) -> None:
    write(plain_folder(tmp_path), *KINDS[kind])
    plain = read_checkpoint(tmp_path, "fp32")
    weights = in_float32(read_checkpoint(tmp_path, "packed").weights, plain.weights)
    assert compare(plain.shape, weights, REFERENCE_OPERATORS) < 1e-6
    shifted = changed(weights, lambda m: replace(m, scales=2 * m.scales.roll(1, 0).contiguous()))
    ours = TritonBackend(plain.shape, shifted, "cpu", REFERENCE_OPERATORS)
    theirs = TorchBackend(plain.shape, plain.weights)
    layout = layout_of(plain.shape, 16, torch.float32)
    tokens = tokens_of(20, vocab_size=plain.shape.vocab_size)
    got, expected = (b.forward([Pool(layout, 3).sequence(20).step(tokens)], None) for b in (ours, theirs))
    logs = expected.log_softmax(-1)
    assert float((logs.exp() * (logs - got.log_softmax(-1))).sum()) > MOST_KL, "the bound must see this"


def test_text_is_that_of_the_dequantised_weights_with_the_kernels(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    from kernels.gpu.launch import INTERPRETED

    if not INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 was not set before Triton was imported")
    write(plain_folder(tmp_path), *KINDS["int4 with zeros"])
    plain = read_checkpoint(tmp_path, "fp32")
    weights = in_float32(read_checkpoint(tmp_path, "packed").weights, plain.weights)
    assert compare(plain.shape, weights, None, steps=3) < 1e-6


def test_prompts_of_many_rows_multiply_numbers_that_were_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "LIBRARY_ROWS", 20)
    calls = []

    def unpack(weight: PackedMatrix, out: torch.Tensor) -> torch.Tensor:
        calls.append(weight.shape)
        return out.copy_(dequantise(weight))

    write(plain_folder(tmp_path), *KINDS["awq"])
    plain = read_checkpoint(tmp_path, "fp32")
    weights = in_float32(read_checkpoint(tmp_path, "packed").weights, plain.weights)
    assert compare(plain.shape, weights, replace(REFERENCE_OPERATORS, unpack=unpack), steps=2) < 1e-6
    assert len(calls) == 4 * plain.shape.num_layers, "each product of the prompt, none of the next step"


def test_values_in_another_format_than_queries_and_keys_are_multiplied_beside_them() -> None:
    shape = shape_of(hidden_size=256, intermediate_size=256, num_heads=4, num_kv_heads=2, head_dim=64)
    formats: tuple[BlockFormat, ...] = ("q4_k", "q4_k", "q6_k", "q8_0", "q5_k", "q5_k", "q4_0")
    dense = weights_of(shape, torch.float32)

    def block(number: int, matrix: torch.Tensor) -> PackedMatrix:
        name = formats[number % 10]
        made = kquant_blocks(name, len(matrix), number) if name in KQUANT_BYTES else None
        blocks = random_blocks(*matrix.shape, name, number) if made is None else BlockMatrix(name, 256, made)
        found = from_blocks(blocks)
        assert found is not None
        return found

    weights = with_matrices(dense, block)
    head = from_blocks(BlockMatrix("q6_k", 256, kquant_blocks("q6_k", shape.vocab_size, 3)))
    assert compare(shape, replace(weights, head=head), REFERENCE_OPERATORS, steps=2) < 1e-6


@pytest.mark.parametrize("rows", [3, 20, 70])
def test_inputs_of_many_rows_are_put_in_order_before_the_product(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "LIBRARY_ROWS", 64)
    matrix, numbers = drawn(24, 256, 128, ordered=True)
    seen = []

    def packed_linear(x: torch.Tensor, weight: PackedMatrix, *rest: Any, **how: Any) -> torch.Tensor:
        seen.append(weight.order is None)
        return REFERENCE_OPERATORS.packed_linear(x, weight, *rest, **how)

    operators = replace(REFERENCE_OPERATORS, packed_linear=packed_linear)
    x, out, room = torch.randn(rows, 256), torch.empty(rows, 24), torch.empty(24 * 256)
    packed.PackedLinear(matrix, None).multiply(operators, x, room, out=out)
    torch.testing.assert_close(out, x @ numbers.T, atol=1e-4, rtol=0)
    assert (out - x @ numbers[:, matrix.order].T).abs().max() > 0.01, "the order matters"
    assert seen == ([rows > 16] if rows < 64 else [])
