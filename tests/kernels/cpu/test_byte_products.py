"""Products of 8-bit matrices in the native step against their reference: odd depths, outliers, NaN.

A model whose layer adds nothing is its head over the normed embedding: logits are one product, and what
differs is the rounding of one norm and of float sums.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights import Weights
from kernels.byte_linear import dequantise, linear, quantise_matrix
from kernels.cpu import library as native
from kernels.rms_norm import rms_norm
from tests.kernels.cpu.tiny_models import Pool, byte_weights_of, layout_of, shape_of

ROWS = 29
SETS = native.instruction_sets(native.BYTES)
DEPTHS = [1, 4, 31, 100, 319, 320, 321, 512, 575, 576, 577, 640, 1153]


def product_of(depth: int, outliers: int) -> tuple[ModelShape, Weights]:
    """Return a layer that adds nothing, with `outliers` columns of the embedding far above the others."""
    shape = shape_of(hidden_size=depth, num_layers=1, vocab_size=ROWS + 10)
    weights = byte_weights_of(shape, seed=depth)
    layer = weights.layers[0]
    nothing = {name: quantise_matrix(torch.zeros(getattr(layer, name).shape)) for name in ("o", "down")}
    embed = weights.embed.clone()
    embed[:, torch.randperm(depth, generator=torch.Generator().manual_seed(3))[:outliers]] *= 200
    return shape, replace(weights, embed=embed, layers=(replace(layer, **nothing),))


def computed(shape: ModelShape, weights: Weights, instructions: str, tokens: list[int]) -> torch.Tensor:
    backend = NativeBackend(shape, weights, torch.bfloat16, instructions)
    backend.set_threads(2)
    sequence = Pool(layout_of(shape, 16, torch.bfloat16), 4).sequence(len(tokens))
    return backend.forward([sequence.step(tokens, trailing=len(tokens))], None)


@pytest.mark.parametrize("outliers", [0, 3, 40])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("instructions", SETS)
def test_native_byte_products_equal_the_reference(instructions: str, depth: int, outliers: int) -> None:
    shape, weights = product_of(depth, outliers)
    tokens = list(range(ROWS))
    normed = rms_norm(weights.embed[tokens].float(), weights.final_norm, shape.rms_eps)
    head = dequantise(weights.output_matrix())  # type: ignore[arg-type]
    meant = linear(normed, head)
    difference = computed(shape, weights, instructions, tokens) - meant
    # A number in ten thousand lies so near to a half that the norm's last bit decides. Such a row differs
    # by a step in one number, the others by no more than float sums do.
    same = (difference.abs() <= 2e-5 * meant.abs().amax(dim=1, keepdim=True)).all(dim=1)
    assert same.float().mean() > 0.8
    rounding = (functional.linear(normed, head) - meant).norm()
    assert difference.norm() <= 0.2 * rounding + 2e-5 * meant.norm()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("instructions", SETS)
def test_a_row_that_is_not_finite_changes_no_other(instructions: str, bad: float) -> None:
    shape, weights = product_of(1200, 3)
    tokens = list(range(ROWS))
    good = computed(shape, weights, instructions, tokens)
    weights.embed[20, 1199] = bad
    spoiled = computed(shape, weights, instructions, tokens)
    assert spoiled[20].isnan().all()
    # Rows after it attend to it; here they add nothing of what they see, but nothing times NaN is NaN.
    assert torch.equal(spoiled[:20], good[:20])


@pytest.mark.parametrize("depth", [576, 577])
def test_instruction_sets_agree_but_for_float_sums(depth: int) -> None:
    shape, weights = product_of(depth, 3)
    first, *others = (computed(shape, weights, name, list(range(ROWS))) for name in SETS)
    for other in others:
        near = ((other - first).abs() <= 2e-5 * first.abs().amax(dim=1, keepdim=True)).all(dim=1)
        assert near.float().mean() > 0.8


@pytest.mark.parametrize("rows", [1, 2, 5, 11, 12, 13, 25])
@pytest.mark.parametrize("instructions", SETS)
def test_a_row_has_its_bits_however_many_there_are(instructions: str, rows: int) -> None:
    shape, weights = product_of(1152, 3)
    all_rows = computed(shape, weights, instructions, list(range(ROWS)))
    assert torch.equal(computed(shape, weights, instructions, list(range(rows))), all_rows[:rows])
