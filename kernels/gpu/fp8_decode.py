"""Decode attention whose products are of FP8, over a cache in FP8: what paged_decode.py does otherwise then.

The meaning is kernels/fp8_attention.py's `fp8_decode`. A head's query is rounded as it is read, keys and
values are multiplied as the cache has them, and weights are rounded 256 times as large.

Decode attention is bound by the bytes that it reads, and those stay. By arithmetic for an H200, which moves
30 GB/s a multiprocessor: 16-bit products make half an instruction a number of keys and values that are read,
15 G instructions/s of the 224 G that a multiprocessor issues, and matrix instructions of 16 rows take a tenth
of the tensor cores' time. Products of FP8 spare that half instruction and round queries and weights, and FP8
values lie with the wrong side contiguous for matrix instructions, so that bytes are shuffled in their place.
So it is off by default, and for a card that shows otherwise. Hopper is refused: its products of FP8 take 64
rows of one program, and for 16 this Triton makes products of 16 bits of rounded numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.fp8_attention import WEIGHT_SCALE
from kernels.fp8_cache import LARGEST
from kernels.gpu.fp8_prefill import lacks_fp8
from kernels.gpu.round_rows import round_to, to_e4m3

_HOPPER = 9
_PEAK = tl.constexpr(LARGEST)
_WEIGHT_SCALE = tl.constexpr(WEIGHT_SCALE)


def lacks_fp8_decode(device: torch.device, head_dim: int) -> str | None:
    """Return why decode rows with heads of `head_dim` are not multiplied in FP8 on `device`; None if so."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER:
        return "compute capability 9.0: sixteen rows are multiplied in 16 bits there"
    return lacks_fp8(device, head_dim)


@triton.jit
def rounded_rows(q, key_scale, TYPE: tl.constexpr, BY_HAND: tl.constexpr):
    """Return float32 `q [rows, dims]` rounded to TYPE, a scale a row, and factors of scores: `[rows]`, those
    scales times `key_scale`. BY_HAND as in `round_to`.
    """
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(q), axis=1), 1e-12), _PEAK)
    scaled = tl.div_rn(q, tl.broadcast_to(scale[:, None], q.shape))
    return round_to(scaled, _PEAK, TYPE, BY_HAND), scale * key_scale


@triton.jit
def add_rounded(weights, v, acc, TILE: tl.constexpr, BY_HAND: tl.constexpr):
    """Return the sum of `acc [rows, dims]` and `weights [rows, TILE]`, at most 1, times `v [TILE, dims]`."""
    large = weights * _WEIGHT_SCALE
    if BY_HAND:
        large = to_e4m3(large)
    return acc + tl.dot(large.to(v.dtype), v, max_num_imprecise_acc=TILE) * (1.0 / _WEIGHT_SCALE)
