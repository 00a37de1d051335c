"""Bytes in codes are the bytes: native steps have the same bits with the one and with the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.native.packing import Packer
from diptych.engine.backends.native.status import NativeError
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights import Weights
from kernels.byte_codes import CodedBytes, as_bytes
from kernels.byte_linear import quantise_matrix
from kernels.cpu import library as native
from tests.forms import sampled
from tests.kernels.cpu.tiny_models import Pool, coded_weights_of, layout_of, shape_of, tokens_of

SETS = native.instruction_sets(native.BYTES)
SHAPES = {
    "odd": shape_of(),
    "several-segments": shape_of(hidden_size=640, intermediate_size=1220),
    "biases": shape_of(hidden_size=33, qkv_bias=True, output_bias=True, mlp_bias=True),
}
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


def in_bytes(weights: Weights) -> Weights:
    """Return the model with its codes read."""
    layers = [
        replace(layer, **{name: as_bytes(getattr(layer, name)) for name in MATRICES})
        for layer in weights.layers
    ]
    return replace(weights, layers=tuple(layers))


def steps(shape: ModelShape, weights: Weights, instructions: str, rows: int) -> list[torch.Tensor]:
    """Compute a prompt of `rows` tokens, then one token more beside another prompt, on one or two threads."""
    backend = NativeBackend(shape, weights, torch.bfloat16, instructions)
    backend.set_threads(1 + rows % 2)
    pool = Pool(layout_of(shape, 16, torch.bfloat16), 12)
    a, b = pool.sequence(rows + 1), pool.sequence(20)
    tokens = tokens_of(rows + 1, shape.vocab_size)
    return [
        backend.forward([a.step(tokens[:rows], trailing=rows)], None),
        backend.forward([a.step(tokens[rows:]), b.step(tokens_of(20, shape.vocab_size, 3))], None),
    ]


@pytest.mark.parametrize("rows", sampled([1, 2, 3, 4, 5, 12, 13, 40], [1, 4, 5, 12, 13]))
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("instructions", SETS)
def test_codes_give_the_bits_of_their_bytes(instructions: str, name: str, rows: int) -> None:
    shape = SHAPES[name]
    weights = coded_weights_of(shape, "q4_1" if rows % 2 else "q4_0")
    coded = steps(shape, weights, instructions, rows)
    plain = steps(shape, in_bytes(weights), instructions, rows)
    for ours, theirs in zip(coded, plain, strict=True):
        assert ours.isfinite().all()
        assert torch.equal(ours, theirs)


def test_codes_without_slopes_are_refused() -> None:
    shape = shape_of()
    weights = coded_weights_of(shape, "q4_1")
    backend = NativeBackend(shape, weights, torch.bfloat16)
    codes = weights.layers[0].o
    assert isinstance(codes, CodedBytes)
    matrix = native.Matrix(
        codes.codes.data_ptr(), *codes.shape, native.I8_CODED, None, codes.scales.data_ptr(), None
    )
    with pytest.raises(NativeError, match="slopes"):
        backend._check(backend._library.diptych_set_linear(backend._model, 0, native.OUTPUT, matrix, 1))


def test_a_matrix_that_is_set_again_keeps_nothing_of_the_old_one() -> None:
    """Codes left behind would take few rows through the old weights, and many through the new."""
    shape = shape_of()
    weights = coded_weights_of(shape, "q4_0")
    backend = NativeBackend(shape, weights, torch.bfloat16)
    new = quantise_matrix(torch.randn(tuple(weights.layers[0].o.shape)))
    packer = Packer(backend._library, backend._model, torch.bfloat16)
    packer.set_linear(0, native.OUTPUT, (new, None))
    pool, tokens = Pool(layout_of(shape, 16, torch.bfloat16), 8), tokens_of(6)
    together = backend.forward([pool.sequence(8).step(tokens, trailing=6)], None)
    sequence = pool.sequence(8)
    alone = torch.cat([backend.forward([sequence.step([token])], None) for token in tokens])
    assert torch.equal(together, alone)
