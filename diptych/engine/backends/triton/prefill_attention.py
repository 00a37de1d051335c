"""Choice of prefill attention: our own kernel in 16 bits, or what the user asks for.

`DIPTYCH_PREFILL_ATTENTION=flash` takes FlashAttention-3, `fp8` our kernel with products of FP8, for keys and
values that are kept in FP8; anything else but `own` is refused by name. The batch-invariant step has an
operator of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import torch

from diptych.engine.backends.triton.batch_invariant import invariant_operators
from diptych.engine.backends.triton.operators import Operator, Operators, triton_operators
from diptych.engine.models.shape import ModelShape, UnsupportedModel

VARIABLE = "DIPTYCH_PREFILL_ATTENTION"


def chosen_operators(
    shape: ModelShape,
    device: torch.device,
    *,
    fp8_cache: bool = False,
    batch_invariant: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> Operators:
    """Return the Triton kernels for models of `shape` on `device`, with the prefill attention that
    `environment` names; `fp8_cache` says that keys and values are kept in FP8.

    Raises TritonUnavailable, or UnsupportedModel where the named one cannot be had.
    """
    name = environment.get(VARIABLE) or "own"
    if name not in ("own", "flash", "fp8"):
        raise UnsupportedModel(f"{VARIABLE} is {name!r}: it must be own, flash or fp8")
    if batch_invariant:
        if name != "own":
            raise UnsupportedModel(
                f"--batch-invariant: {VARIABLE}={name} is not what decode attention computes"
            )
        return invariant_operators()
    operators = triton_operators()
    if name == "flash":
        return replace(operators, paged_prefill=_flash())
    return replace(operators, paged_prefill=_fp8(shape, device, fp8_cache)) if name == "fp8" else operators


def _flash() -> Operator:
    # Imported here, as in triton_operators.
    from kernels.gpu.flash_prefill import flash_prefill, lacks_flash

    if (why := lacks_flash()) is not None:
        raise UnsupportedModel(f"{VARIABLE}=flash: {why}")
    return flash_prefill


def _fp8(shape: ModelShape, device: torch.device, fp8_cache: bool) -> Operator:
    from kernels.gpu.fp8_prefill import fp8_prefill, lacks_fp8

    if not fp8_cache:
        raise UnsupportedModel(f"{VARIABLE}=fp8: it goes with --kv-cache-dtype fp8")
    if (why := lacks_fp8(device, shape.head_dim)) is not None:
        raise UnsupportedModel(f"{VARIABLE}=fp8: {why}")
    return fp8_prefill
