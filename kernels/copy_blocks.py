"""Copies of whole KV blocks between two memories of one layout, with a digest of each.

The digest tells a block that arrived whole from one that did not, or that is not the one meant: every 64-bit
word is mixed with its place and with the block's binding, and the results are added modulo 2**64, so that any
order of work gives the same sum. It guards against faults, not against forgers. Blocks whose size is no
multiple of eight bytes are cut into words of four, two or one.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

Integers = TypeVar("Integers", torch.Tensor, npt.NDArray[np.int64])
"""int64, and what is done with them wraps: on a host, numpy has the smaller overhead."""

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
"""Odd constants of SplitMix64 (Steele, Lea and Flood 2014)."""


def signed(number: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit number."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def block_words(blocks: torch.Tensor) -> torch.Tensor:
    """View `blocks [num_blocks, ...]` as integers, the widest that fit: `[num_blocks, words]`, sharing
    memory.
    """
    flat = blocks.flatten(1)
    width = next(width for width in WORDS if flat.shape[1] * flat.element_size() % width == 0)
    return flat.view(torch.uint8).view(WORDS[width])


def bind(slot: int, generation: int, indices: Integers) -> Integers:
    """Return the binding, int64 `[n]`, of blocks `indices` (int64 `[n]`) of the table of one grant."""
    keyed = (indices + 1) * signed(GOLDEN) + signed(slot * FIRST + generation * SECOND)
    return mixed(keyed)


def block_digests(blocks: torch.Tensor, ids: torch.Tensor, binding: torch.Tensor) -> torch.Tensor:
    """Return int64 `[n]`: the digest of block `ids[i]` of `blocks [num_blocks, ...]` under `binding[i]`."""
    words = block_words(blocks)[ids].long()
    places = (torch.arange(words.shape[1], device=words.device) + 1) * signed(GOLDEN)
    return mixed(words ^ (binding[:, None] + places)).sum(dim=1)


def copy_blocks(
    source: torch.Tensor, source_ids: torch.Tensor, target: torch.Tensor, target_ids: torch.Tensor
) -> None:
    """Copy block `source_ids[i]` over block `target_ids[i]`, for all i at once, where neither is -1."""
    real = (source_ids >= 0) & (target_ids >= 0)
    block_words(target)[target_ids[real].long()] = block_words(source)[source_ids[real].long()]


def mixed(x: Integers) -> Integers:
    """Mix int64 `x [...]` by two rounds of multiplying and folding, in wrapping 64-bit arithmetic."""
    x = x * signed(FIRST)
    x = x ^ ((x >> 32) & 0xFFFFFFFF)
    x = x * signed(SECOND)
    return x ^ ((x >> 29) & ((1 << 35) - 1))
