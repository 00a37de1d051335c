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
from tests.forms import sampled
from tests.kernels.cpu.tiny_models import Pool, layout_of
from tests.kernels.kquant_blocks import quantise

MOST_KL = 0.01
WINDOW = 160


@cache
def checkpoint() -> Any:
    return read_checkpoint(bundled_oracle.path(), "gguf")


@cache
def tokens() -> list[int]:
    ids = Tokenizer.load(bundled_oracle.path()).encode(python_reference().content[:40_000])
    return list(windows(ids, 1, WINDOW)[0])


@cache
def in_format(name: KQuantFormat) -> Weights:
    """Return the model's weights with every `down` in a format."""

    def quantised(matrix: BlockMatrix) -> BlockMatrix:
        numbers = dequantise(matrix)
        return BlockMatrix(name, matrix.columns, quantise(numbers.view(-1, 256), name).view(len(numbers), -1))

    weights: Weights = checkpoint().weights
    layers = []
    for layer in weights.layers:
        assert isinstance(layer.down, BlockMatrix)
        layers.append(replace(layer, down=quantised(layer.down)))
    return replace(weights, layers=tuple(layers))


class Exact:
    """Logits of the model's own numbers in fp32, with `down` in a format; once for each format."""

    def __init__(self) -> None:
        weights = checkpoint().weights
        names = ("q", "k", "v", "o", "gate", "up")
        self._layers = [
            replace(layer, **{name: full(getattr(layer, name)) for name in names}) for layer in weights.layers
        ]
        self._weights = replace(weights, embed=weights.embed.float(), head=full(weights.head))
        self._found: dict[str, torch.Tensor] = {}

    def logits(self, name: KQuantFormat) -> torch.Tensor:
        if name not in self._found:
            downs = [full(layer.down) for layer in in_format(name).layers]
            layers = [replace(layer, down=down) for layer, down in zip(self._layers, downs, strict=True)]
            backend = TorchBackend(checkpoint().shape, replace(self._weights, layers=tuple(layers)))
            self._found[name] = logits(backend, torch.float32)
        return self._found[name]


def full(matrix: Any) -> Any:
    """Return the numbers of a matrix in fp32."""
    return dequantise(matrix) if isinstance(matrix, BlockMatrix) else matrix


@pytest.fixture(scope="module")
def exact() -> Exact:
    return Exact()


def logits(backend: Any, dtype: torch.dtype) -> torch.Tensor:
    shape = checkpoint().shape
    backend.set_threads(2)
    sequence = Pool(layout_of(shape, 16, dtype), 20).sequence(WINDOW)
    found: torch.Tensor = backend.forward([sequence.step(tokens(), trailing=WINDOW)], None)
    return found


def mean_kl(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    sums = compare(reference, candidate.float(), tokens()[1:])
    return sums.divergence / sums.tokens


@pytest.mark.parametrize("name", sampled(get_args(KQuantFormat), ["q4_k"]))
def test_native_step_is_near_to_the_dequantised_numbers(
    name: KQuantFormat, exact: Exact, record_property: Callable[[str, object], None]
) -> None:
    backend = NativeBackend(checkpoint().shape, in_format(name), torch.bfloat16)
    kl = mean_kl(exact.logits(name), logits(backend, torch.bfloat16))
    record_property("mean_kl", kl)
    print(f"{name}: mean KL {kl:.5f}")
    assert kl < MOST_KL


def test_divergence_sees_a_coarser_format(exact: Exact) -> None:
    """The control: the numbers of Q2_K instead of Q4_K's are further away than the bound."""
    assert mean_kl(exact.logits("q4_k"), exact.logits("q2_k")) > MOST_KL
