"""In what numbers keys and values are kept: what `--kv-cache-dtype` chooses.

auto   those of the computation (diptych/engine/dtype.py)
fp8    E4M3, half the bytes of bf16, with a scale for each layer, its keys or values, and KV head
       (kernels/fp8_cache.py)

The scales are the checkpoint's (`k_scale` and `v_scale`, one a layer or one a head) where it has them, else
1: E4M3 is a floating-point format, so that a scale moves its range, 2**-9 to 448, and not its precision.
Nothing is calibrated when a model is loaded: two workers with one model's files have the same scales.
"""

from __future__ import annotations

from typing import Literal

import torch

from diptych.engine.dtype import Precision, stored_dtype
from diptych.engine.models.shape import ModelShape
from kernels import fp8_cache

KVCacheDtype = Literal["auto", "fp8"]


def kept_dtype(choice: KVCacheDtype, precision: Precision) -> torch.dtype:
    """Of keys and values in their blocks."""
    return fp8_cache.DTYPE if choice == "fp8" else stored_dtype(precision)


def kept_scales(choice: KVCacheDtype, shape: ModelShape, found: torch.Tensor | None) -> torch.Tensor | None:
    """Float32 `[layers, 2, kv_heads]`: what the checkpoint has, `found`, or 1. None: nothing is scaled."""
    if choice != "fp8":
        return None
    return found if found is not None else torch.ones(shape.num_layers, 2, shape.num_kv_heads)
