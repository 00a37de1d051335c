"""Attention's scores on the GPU: their factors in powers of two, and the soft cap.

exp(x) = 2 ** (x * log2(e)): the hardware has powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.launch import LOG2_E

LOG2_E_F32 = tl.constexpr(LOG2_E)


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent of float32 `x [...]`, to the last place or two of 1."""
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


def score_factors(scale: float, cap: float | None) -> tuple[float, float]:
    """Return the factors of products of queries and keys, and of their tangent: log2(e) is in the last one.

    Without a cap (Gemma 2, 2024: `cap * tanh(score / cap)`) there is no tangent, and the first one is all.
    """
    return (scale * LOG2_E, 1.0) if cap is None else (scale / cap, cap * LOG2_E)
