"""Divergence of the native step over K-quants from their own dequantised numbers, on real weights.

Of the bundled model's matrices the inputs of `down` alone are a multiple of 256 wide; the others stay in the
file's blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import pytest
import torch

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.weights import Weights
from diptych.engine.weights.checkpoint import read_checkpoint
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from kernels.kquants import KQuantFormat
from kernels.quantised_linear import BlockMatrix, dequantise
from lab.quality.divergence import compare
from lab.quality.text import python_reference, windows
from tests import bundled_oracle
from tests.kernels.cpu.tiny_models import Pool, layout_of
from tests.kernels.kquant_blocks import quantise

MOST_KL = 0.01
WINDOW = 160
REST = [name for name in get_args(KQuantFormat) if name != "q4_k"]


@cache
def checkpoint() -> Any:
    return read_checkpoint(bundled_oracle.path(), "gguf")


@cache
def tokens() -> list[int]:
    ids = Tokenizer.load(bundled_oracle.path()).encode(python_reference().content[:40_000])
    return list(windows(ids, 1, WINDOW)[0])


def with_down(make: Callable[[BlockMatrix], BlockMatrix]) -> Weights:
    weights: Weights = checkpoint().weights
    layers = []
    for layer in weights.layers:
        assert isinstance(layer.down, BlockMatrix)
        layers.append(replace(layer, down=make(layer.down)))
    return replace(weights, layers=tuple(layers))


def in_format(name: KQuantFormat) -> Callable[[BlockMatrix], BlockMatrix]:
    def make(matrix: BlockMatrix) -> BlockMatrix:
        numbers = dequantise(matrix)
        return BlockMatrix(name, matrix.columns, quantise(numbers.view(-1, 256), name).view(len(numbers), -1))

    return make


def dense(weights: Weights) -> Weights:
    """Return the same numbers in fp32."""

    def full(matrix: Any) -> Any:
        return dequantise(matrix) if isinstance(matrix, BlockMatrix) else matrix

    names = ("q", "k", "v", "o", "gate", "up", "down")
    layers = [
        replace(layer, **{name: full(getattr(layer, name)) for name in names}) for layer in weights.layers
    ]
    return replace(weights, embed=weights.embed.float(), layers=tuple(layers), head=full(weights.head))


def logits(backend: Any, dtype: torch.dtype) -> torch.Tensor:
    shape = checkpoint().shape
    backend.set_threads(2)
    sequence = Pool(layout_of(shape, 16, dtype), 20).sequence(WINDOW)
    found: torch.Tensor = backend.forward([sequence.step(tokens(), trailing=WINDOW)], None)
    return found


def mean_kl(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    sums = compare(reference, candidate.float(), tokens()[1:])
    return sums.divergence / sums.tokens


@pytest.mark.parametrize(
    "name",
    ["q4_k", *(pytest.param(name, marks=pytest.mark.full) for name in REST)],
)
def test_native_step_is_near_to_the_dequantised_numbers(
    name: KQuantFormat, record_property: Callable[[str, object], None]
) -> None:
    weights = with_down(in_format(name))
    shape = checkpoint().shape
    exact = logits(TorchBackend(shape, dense(weights)), torch.float32)
    found = logits(NativeBackend(shape, weights, torch.bfloat16), torch.bfloat16)
    kl = mean_kl(exact, found)
    record_property("mean_kl", kl)
    print(f"{name}: mean KL {kl:.5f}")
    assert kl < MOST_KL


def test_divergence_sees_a_coarser_format() -> None:
    """The control: the numbers of Q2_K instead of the file's own are further away than the bound."""
    shape = checkpoint().shape
    exact = logits(TorchBackend(shape, dense(checkpoint().weights)), torch.float32)
    coarse = logits(TorchBackend(shape, dense(with_down(in_format("q2_k")))), torch.float32)
    assert mean_kl(exact, coarse) > MOST_KL
