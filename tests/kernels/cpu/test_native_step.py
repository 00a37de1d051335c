"""The native step against the torch meaning: every switch of the decoder, odd sizes, every instruction set
of this machine.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from diptych.engine.backends.native import rotations
from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.batch import EmbeddingRows
from diptych.engine.models.shape import ModelShape, RopeScaling
from diptych.engine.weights import Weights
from kernels.cpu import library as native
from kernels.quantised_linear import BLOCK_BYTES, BlockFormat
from tests.forms import sampled
from tests.kernels.cpu.tiny_models import (
    Pool,
    block_weights_of,
    byte_weights_of,
    layout_of,
    shape_of,
    tokens_of,
    weights_of,
)

SHAPES: dict[str, ModelShape] = {
    "llama": shape_of(),
    "tied-all-biases": shape_of(tied_embeddings=True, qkv_bias=True, output_bias=True, mlp_bias=True),
    "query-key-norms": shape_of(qk_norm="head", num_heads=4, num_kv_heads=2, head_dim=64),
    "windows": shape_of(windows=(7, None)),
    "tiny-window": shape_of(windows=(1, 2)),
    "one-kv-head": shape_of(num_kv_heads=1),
    "seven-queries-a-head": shape_of(num_heads=14, num_kv_heads=2, head_dim=16),
    "thirteen-queries-a-head": shape_of(num_heads=13, num_kv_heads=1, head_dim=6),
    "head-of-two": shape_of(head_dim=2),
    "whole-registers": shape_of(hidden_size=64, intermediate_size=128, head_dim=32, vocab_size=256),
    "one-of-everything": shape_of(
        hidden_size=1, num_heads=1, num_kv_heads=1, intermediate_size=1, vocab_size=2
    ),
    "yarn": shape_of(rope_scaling=RopeScaling("yarn", 4.0, 32)),
}
ONE_LAYER = shape_of(num_layers=1)
EVERY_SET = [
    (dtype, name)
    for dtype, number in ((torch.float32, native.FP32), (torch.bfloat16, native.BF16))
    for name in native.instruction_sets(number)
]


def mixed_batches(shape: ModelShape, backend: Any, block_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Three sequences in two memories: prompts in chunks across block borders, then decode beside
    prefill.
    """
    layout = layout_of(shape, block_size, dtype)
    near, far = Pool(layout, 40, seed=1), Pool(layout, 60, seed=2)
    a, b, c = near.sequence(40), far.sequence(40), far.sequence(40)
    tokens = tokens_of(40, shape.vocab_size)
    return [
        backend.forward([a.step(tokens[:17]), b.step(tokens[3:20], wants_logits=False)], None),
        backend.forward([b.step(tokens[20:21]), a.step(tokens[17:18]), c.step(tokens[:30])], None),
        backend.forward([c.step(tokens[30:36], wants_logits=False), a.step(tokens[18:19])], None),
        backend.forward([b.step(tokens[21:34], trailing=5), c.step(tokens[36:37])], None),
        backend.forward([a.step(tokens[19:27], trailing=8), b.step(tokens[34:35], wants_logits=False)], None),
    ]


@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.parametrize("name", SHAPES)
def test_fp32_steps_equal_the_torch_backend(name: str, block_size: int) -> None:
    shape = SHAPES[name]
    weights = weights_of(shape, torch.float32)
    native_backend = NativeBackend(shape, weights, torch.float32)
    native_backend.set_threads(2)
    expected = mixed_batches(shape, TorchBackend(shape, weights), block_size, torch.float32)
    actual = mixed_batches(shape, native_backend, block_size, torch.float32)
    for want, got in zip(expected, actual, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_step_takes_more_rows_of_images_than_the_vocabulary_has_tokens() -> None:
    shape = shape_of(vocab_size=7)
    weights = weights_of(shape, torch.float32)
    rows = torch.randn(40, shape.hidden_size, generator=torch.Generator().manual_seed(3))

    def logits(backend: Any, given: torch.Tensor) -> torch.Tensor:
        layout = layout_of(shape, 16, torch.float32)
        step = Pool(layout, 20).sequence(50).step(tokens_of(50, shape.vocab_size), trailing=50)
        found: torch.Tensor = backend.forward([replace(step, embeddings=[EmbeddingRows(6, given)])], None)
        return found

    backend = NativeBackend(shape, weights, torch.float32)
    expected = logits(TorchBackend(shape, weights), rows)
    torch.testing.assert_close(logits(backend, rows), expected, rtol=1e-4, atol=1e-4)
    last = torch.cat([rows[:-1], -rows[-1:]])
    assert (logits(backend, last)[45:] - expected[45:]).abs().max() > 1e-2, "the last row counts"


@pytest.mark.parametrize("block_size", sampled([12, 16, 32], [12, 16]))
@pytest.mark.parametrize("head_dim", [40, 64, 6])
@pytest.mark.parametrize(("dtype", "instructions"), EVERY_SET, ids=str)
def test_every_instruction_set_equals_the_torch_backend(
    dtype: torch.dtype, instructions: str, head_dim: int, block_size: int
) -> None:
    shape = shape_of(qkv_bias=True, mlp_bias=True, qk_norm="head", windows=(None, 9), head_dim=head_dim)
    weights = weights_of(shape, dtype)
    backend = NativeBackend(shape, weights, dtype, instructions)
    # The bf16 weights in fp32 arithmetic are what bf16 kernels come near to: their sums are fp32, and only
    # activations, keys and values are rounded, to 8 bits.
    exact = weights_of(shape, torch.bfloat16)
    meaning = TorchBackend(shape, as_fp32(exact) if dtype == torch.bfloat16 else weights)
    expected = mixed_batches(shape, meaning, block_size, torch.float32)
    actual = mixed_batches(shape, backend, block_size, dtype)
    for want, got in zip(expected, actual, strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        else:
            error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
            assert error < 0.02


@pytest.mark.parametrize("block_size", sampled([16, 12], [12]))
@pytest.mark.parametrize("format", BLOCK_BYTES)
@pytest.mark.parametrize("instructions", native.instruction_sets(native.BLOCKS))
@pytest.mark.parametrize("name", ["llama", "tied-all-biases", "query-key-norms", "one-of-everything"])
def test_steps_over_block_matrices_equal_the_torch_backend(
    name: str, instructions: str, format: BlockFormat, block_size: int
) -> None:
    shape = SHAPES[name]
    weights = block_weights_of(shape, format)
    backend = NativeBackend(shape, weights, torch.bfloat16, instructions)
    backend.set_threads(2)
    expected = mixed_batches(shape, TorchBackend(shape, weights), block_size, torch.bfloat16)
    actual = mixed_batches(shape, backend, block_size, torch.bfloat16)
    for want, got in zip(expected, actual, strict=True):
        # Sums in another order differ in the last bit, which now and then rounds an activation to the
        # neighbouring whole number, one of 127, or a key to the neighbouring bf16.
        error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
        assert error < 0.03


@pytest.mark.parametrize("block_size", sampled([16, 12], [16]))
@pytest.mark.parametrize("instructions", native.instruction_sets(native.BYTES))
@pytest.mark.parametrize(
    "name", ["llama", "tied-all-biases", "query-key-norms", "one-of-everything", "segments"]
)
def test_steps_over_byte_matrices_equal_the_torch_backend(
    name: str, instructions: str, block_size: int
) -> None:
    shape = SHAPES.get(name) or shape_of(hidden_size=903, intermediate_size=530, num_heads=9)
    weights = byte_weights_of(shape)
    backend = NativeBackend(shape, weights, torch.bfloat16, instructions)
    backend.set_threads(2)
    expected = mixed_batches(shape, TorchBackend(shape, weights), block_size, torch.bfloat16)
    actual = mixed_batches(shape, backend, block_size, torch.bfloat16)
    for want, got in zip(expected, actual, strict=True):
        # As with blocks: another rounding in the last bit is now and then another whole number.
        error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
        assert error < 0.03


def as_fp32(weights: Any) -> Any:
    """Return the weights in fp32."""

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.float()
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        return converted(value) if is_dataclass(value) else value

    def converted(holder: Any) -> Any:
        return replace(holder, **{f.name: convert(getattr(holder, f.name)) for f in fields(holder)})

    return converted(weights)


def test_positions_beyond_the_first_rotary_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotations, "FIRST_POSITIONS", 2048)
    shape = shape_of(num_layers=1)
    weights = weights_of(shape, torch.float32)
    tokens = tokens_of(2100)
    results = []
    for backend in (NativeBackend(shape, weights, torch.float32), TorchBackend(shape, weights)):
        sequence = Pool(layout_of(shape, 16, torch.float32), 140).sequence(2100)
        results.append(backend.forward([sequence.step(tokens)], None))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "weights",
    [
        weights_of(ONE_LAYER, torch.float32),
        weights_of(ONE_LAYER, torch.bfloat16),
        block_weights_of(ONE_LAYER, "q4_1"),
        byte_weights_of(ONE_LAYER),
    ],
    ids=["fp32", "bf16", "blocks", "bytes"],
)
def test_infinity_in_one_sequence_changes_no_other(weights: Weights) -> None:
    """Rows that the model drives to NaN must not spoil neighbours, nor earlier rows of their own chunk."""
    dtype = weights.embed.dtype
    weights.embed[7] = float("inf")
    backend = NativeBackend(ONE_LAYER, weights, dtype)
    pool = Pool(layout_of(ONE_LAYER, 16, dtype), 10)
    clean, sick = pool.sequence(16), pool.sequence(16)
    alone = backend.forward([clean.step([1, 2, 3])], None)
    poisoned = replace(sick.step([1, 2, 3, 7, 4]), trailing=5)
    together = backend.forward([poisoned, pool.sequence(16).step([1, 2, 3])], None)
    assert together[3:5].isnan().all()
    assert torch.equal(together[2], alone[0])
    assert torch.equal(together[5], alone[0])
