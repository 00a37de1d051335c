"""Products with K-quants in the native step against the torch meaning, on every instruction set."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.weights import Weights
from kernels.cpu import library as native
from kernels.kquants import KQuantFormat
from kernels.quantised_linear import BLOCK_BYTES, BlockFormat, BlockMatrix
from tests.forms import sampled
from tests.kernels.cpu import tiny_models
from tests.kernels.cpu.test_native_step import mixed_batches
from tests.kernels.cpu.tiny_models import Pool, layout_of, shape_of, tokens_of, weights_of
from tests.kernels.kquant_blocks import random_blocks

SHAPE = shape_of(
    hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=32, intermediate_size=512, vocab_size=150
)
SETS = native.instruction_sets(native.BLOCKS)
FORMATS = get_args(KQuantFormat)
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


def weights_in(formats: dict[str, BlockFormat], head: BlockFormat, seed: int = 5) -> Weights:
    """Return random weights, each matrix in its format."""
    dense = weights_of(SHAPE, torch.float32, seed)
    layers = []
    for index, layer in enumerate(dense.layers):
        made = {
            name: matrix_in(formats[name], *getattr(layer, name).shape, seed + 10 * index + number)
            for number, name in enumerate(MATRICES)
        }
        layers.append(replace(layer, **made))
    last = matrix_in(head, SHAPE.vocab_size, SHAPE.hidden_size, seed + 9)
    return replace(dense, embed=dense.embed.bfloat16(), layers=tuple(layers), head=last)


def matrix_in(name: BlockFormat, rows: int, columns: int, seed: int) -> BlockMatrix:
    if name in BLOCK_BYTES:
        return tiny_models.random_blocks(rows, columns, name, seed)
    blocks = random_blocks(name, rows * columns // 256, seed)
    return BlockMatrix(name, columns, blocks.view(rows, -1))


def all_in(name: BlockFormat) -> Weights:
    return weights_in(dict.fromkeys(MATRICES, name), name)


def as_q4_k_m() -> Weights:
    """Return the formats that llama.cpp mixes in a file of the type Q4_K_M."""
    formats: dict[str, BlockFormat] = dict.fromkeys(MATRICES, "q4_k") | {"v": "q6_k", "down": "q6_k"}
    return weights_in(formats, "q6_k")


MODELS = {name: lambda name=name: all_in(name) for name in FORMATS} | {
    "q4_k_m": as_q4_k_m,
    "q8_0 beside q5_k": lambda: weights_in(dict.fromkeys(MATRICES, "q5_k") | {"k": "q8_0"}, "q4_0"),
}


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("name", MODELS)
def test_steps_equal_the_torch_backend(name: str, instructions: str) -> None:
    weights = MODELS[name]()
    fast = NativeBackend(SHAPE, weights, torch.bfloat16, instructions)
    fast.set_threads(2)
    slow = TorchBackend(SHAPE, weights)
    expected = mixed_batches(SHAPE, slow, 16, torch.bfloat16)
    found = mixed_batches(SHAPE, fast, 16, torch.bfloat16)
    for want, got in zip(expected, found, strict=True):
        error = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
        # Attention of the sets with bf16 products rounds queries and probabilities to bf16 as well.
        assert error < (0.05 if "bf16" in instructions or "zen5" in instructions else 0.03)


@pytest.mark.parametrize("instructions", sampled(SETS, (SETS[0], SETS[-1])))
@pytest.mark.parametrize("name", MODELS)
def test_neighbours_change_no_bit(name: str, instructions: str) -> None:
    backend = NativeBackend(SHAPE, MODELS[name](), torch.bfloat16, instructions)
    backend.set_threads(1)
    layout = layout_of(SHAPE, 16, torch.bfloat16)
    prompts = [tokens_of(5 + 3 * i, seed=i) for i in range(13)]
    alone = [backend.forward([Pool(layout, 20).sequence(60).step(prompt)], None) for prompt in prompts]
    pool = Pool(layout, 80)
    together = backend.forward([pool.sequence(60).step(prompt) for prompt in prompts], None)
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("name", FORMATS)
def test_other_blocks_are_another_model(name: KQuantFormat) -> None:
    """The control: one byte of one block changes the logits beyond the tolerance of the comparison."""
    weights = all_in(name)
    down = weights.layers[0].down
    assert isinstance(down, BlockMatrix)
    changed = down.blocks.clone()
    changed[:, 40:44] ^= 0x77
    layer = replace(weights.layers[0], down=BlockMatrix(name, down.columns, changed))
    other = replace(weights, layers=(layer, *weights.layers[1:]))
    logits = [
        NativeBackend(SHAPE, one, torch.bfloat16).forward(
            [Pool(layout_of(SHAPE, 16, torch.bfloat16), 20).sequence(40).step(tokens_of(20))], None
        )
        for one in (weights, other)
    ]
    assert (logits[0] - logits[1]).abs().max() > 0.05


def test_parts_of_other_formats_must_end_at_a_packed_block() -> None:
    weights = as_q4_k_m()
    odd = shape_of(
        hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=12, intermediate_size=512, vocab_size=150
    )
    layers = []
    for layer in weights.layers:
        q = matrix_in("q4_k", 48, 256, 1)
        k, v = matrix_in("q4_k", 24, 256, 2), matrix_in("q6_k", 24, 256, 3)
        layers.append(replace(layer, q=q, k=k, v=v, o=matrix_in("q8_0", 256, 48, 4)))
    with pytest.raises(Exception, match="format"):
        NativeBackend(odd, replace(weights, layers=tuple(layers)), torch.bfloat16)
