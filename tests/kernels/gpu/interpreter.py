"""Triton's interpreter, with products of matrices whose every row is summed in the same order.

The interpreter multiplies tiles by numpy, and numpy by BLAS, which may sum the same row in another order
where it lies elsewhere in the tile: OpenBLAS's kernels for AVX2 do, those for AVX-512 do not. A GPU's
`tl.dot` does not, and the tests that no neighbour changes a bit are about the kernel, not about the BLAS.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def sum_all_rows_alike() -> None:
    """Make `tl.dot` numpy's own loop, in place of BLAS, wherever it would have been BLAS."""
    blas_dot = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        if a.data.dtype.kind != "f" or b.data.dtype.kind != "f":
            return blas_dot(self, a, b, d, *how)
        products = np.einsum("mk,kn->mn", a.data, b.data, dtype=d.data.dtype)
        return TensorHandle(products + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot
