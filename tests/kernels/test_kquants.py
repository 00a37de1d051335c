"""K-quants and IQ4_XS: their numbers against the `gguf` package's, for random bits."""

from __future__ import annotations

from typing import get_args

import gguf
import numpy as np
import pytest
import torch

from kernels.kquants import KQUANT_BYTES, KQuantFormat, dequantise_blocks
from kernels.quantised_linear import BlockMatrix, dequantise
from tests.kernels.kquant_blocks import quantise, random_blocks


@pytest.mark.parametrize("name", get_args(KQuantFormat))
def test_numbers_equal_those_of_the_gguf_package(name: KQuantFormat) -> None:
    kind = gguf.GGMLQuantizationType[name.upper()]
    assert gguf.GGML_QUANT_SIZES[kind] == (256, KQUANT_BYTES[name])
    blocks = random_blocks(name, 64, seed=3)
    expected = gguf.quants.dequantize(blocks.numpy(), kind)
    found = dequantise_blocks(blocks, name)
    assert np.array_equal(found.numpy(), expected)
    matrix = BlockMatrix(name, 512, blocks.view(32, -1))
    assert torch.equal(dequantise(matrix), found.view(32, 512))


@pytest.mark.parametrize("name", get_args(KQuantFormat))
def test_each_byte_of_a_block_counts(name: KQuantFormat) -> None:
    """The control: a reader that skipped a byte would not notice its change."""
    blocks = random_blocks(name, 1, seed=5)
    whole = dequantise_blocks(blocks, name)
    for at in range(blocks.shape[1]):
        changed = blocks.clone()
        changed[0, at] ^= 0x33
        assert not torch.equal(dequantise_blocks(changed, name), whole), at


@pytest.mark.parametrize(
    ("name", "error"),
    [("q2_k", 0.4), ("q3_k", 0.2), ("q4_k", 0.1), ("q5_k", 0.05), ("q6_k", 0.03), ("iq4_xs", 0.13)],
)
def test_numbers_come_back_near(name: KQuantFormat, error: float) -> None:
    """The quantiser of the tests is right: what it packs is what the reader finds."""
    values = torch.randn(200, 256, generator=torch.Generator().manual_seed(7)) * 0.06
    found = dequantise_blocks(quantise(values, name), name)
    assert (found - values).square().mean().sqrt() < error * 0.06
