"""Choice of attention: our own kernels in 16 bits, or what the user asks for.

`DIPTYCH_PREFILL_ATTENTION=flash` takes FlashAttention-3, `fp8` our kernel with products of FP8, for keys and
values that are kept in FP8; `DIPTYCH_DECODE_ATTENTION=fp8` multiplies so in decode rows, `apart` rotates,
writes and joins splits in launches of their own. Anything else but `own` is refused by name. The
batch-invariant step has operators of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from diptych.engine.backends.triton.batch_invariant import invariant_operators
from diptych.engine.backends.triton.operators import Operator, Operators, triton_operators
from diptych.engine.models.shape import ModelShape, UnsupportedModel

VARIABLE = "DIPTYCH_PREFILL_ATTENTION"
DECODE_VARIABLE = "DIPTYCH_DECODE_ATTENTION"
_KNOWN = {VARIABLE: ("own", "flash", "fp8"), DECODE_VARIABLE: ("own", "apart", "fp8")}


def chosen_operators(
    shape: ModelShape,
    device: torch.device,
    *,
    fp8_cache: bool = False,
    batch_invariant: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> Operators:
    """Return the Triton kernels for models of `shape` on `device`, with the attention that `environment`
    names; `fp8_cache` says that keys and values are kept in FP8.

    Raises TritonUnavailable, or UnsupportedModel where the named one cannot be had.
    """
    named = {variable: _named(variable, environment) for variable in _KNOWN}
    if batch_invariant:
        for variable, name in named.items():
            if name != "own":
                raise UnsupportedModel(f"--batch-invariant: {variable}={name} has another order of sums")
        return invariant_operators()
    operators = triton_operators()
    if named[VARIABLE] == "flash":
        operators = replace(operators, paged_prefill=_flash())
    elif named[VARIABLE] == "fp8":
        operators = replace(operators, paged_prefill=_fp8(shape, device, fp8_cache))
    if named[DECODE_VARIABLE] == "apart":
        joined_apart = partial(operators.paged_decode, apart=True)
        operators = replace(operators, paged_decode=joined_apart, fresh_rows=None)
    elif named[DECODE_VARIABLE] == "fp8":
        operators = replace(operators, paged_decode=_fp8_decode(shape, device, fp8_cache))
    return operators


def _named(variable: str, environment: Mapping[str, str]) -> str:
    """Return what the environment names. Raises UnsupportedModel for what is not known."""
    name, known = environment.get(variable) or "own", _KNOWN[variable]
    if name not in known:
        raise UnsupportedModel(f"{variable} is {name!r}: it must be {', '.join(known[:-1])} or {known[-1]}")
    return name


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


def _fp8_decode(shape: ModelShape, device: torch.device, fp8_cache: bool) -> Operator:
    from kernels.gpu.fp8_decode import lacks_fp8_decode
    from kernels.gpu.paged_decode import paged_decode

    if not fp8_cache:
        raise UnsupportedModel(f"{DECODE_VARIABLE}=fp8: it goes with --kv-cache-dtype fp8")
    if (why := lacks_fp8_decode(device, shape.head_dim)) is not None:
        raise UnsupportedModel(f"{DECODE_VARIABLE}=fp8: {why}")
    return partial(paged_decode, eight=True)
