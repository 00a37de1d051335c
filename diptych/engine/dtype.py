"""Precision of a model, which `--dtype` chooses, and of its KV cache (`--kv-cache-dtype`).

fp32   everything float32: the oracle that the others are judged by
fp16   as bf16, in float16; on GPUs only
bf16   weights, inputs of products, keys and values bfloat16; sums float32
int8   matrices with 8 bits a number and a scale for at most 576 of them; inputs of products likewise, but for
       the four outlier columns of each segment, which have 16 bits (kernels/byte_linear.py); embedding, keys
       and values bfloat16, all else float32. What a GGUF file has in 4 bits is kept in these, too, for steps
       of one row, on some CPUs of up to four (kernels/byte_codes.py)
gguf   matrices in the blocks of the GGUF file as they are (Q4_0, Q4_1, Q8_0, Q2_K to Q6_K, IQ4_XS, IQ4_NL,
       MXFP4), codes of four bits of a folder of GPTQ, AWQ or compressed-tensors as Q4_1, others as Q8_0;
       inputs of products in groups of 32, with 8 bits or 16; the rest as in int8
       (kernels/quantised_linear.py)
packed on GPUs: matrices as the file has them: in codes that are unpacked in registers to bfloat16
       (kernels/packed_matrix.py), or in FP8 or int8 whose inputs are rounded likewise where the file says so
       (kernels/scaled_matrix.py); experts in codes (kernels/packed_stack.py); the rest as in bf16
fp8    on GPUs: matrices of the layers in E4M3 with a scale for each output, inputs of their products with a
       scale for each row; experts, the output matrix and the rest as in bf16
w8a8   as fp8, in int8: what `--quantization int8` is on GPUs

Keys and values are kept in the precision's own dtype (`auto`) or in `fp8`: E4M3, half the bytes of bf16, with
a scale for each layer, its keys or values, and KV head (kernels/fp8_cache.py); on CPUs also in `int8`, with a
scale for each token and head inside the block (kernels/int8_cache.py). The scales of FP8 are the
checkpoint's (`k_scale` and `v_scale`, one a layer or one a head) where it has them, else 1: E4M3 is a
floating-point format, so that a scale moves its range, 2**-9 to 448, and not its precision. Nothing is
calibrated when a model is loaded: two workers with one model's files have the same scales.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch

from diptych.engine.models.shape import ModelShape, UnsupportedModel
from kernels import fp8_cache, int8_cache

Precision = Literal["fp32", "fp16", "bf16", "int8", "gguf", "packed", "fp8", "w8a8"]
KVCacheDtype = Literal["auto", "fp8", "int8"]

PLAIN: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
"""Precisions that store every number in one dtype."""

ON_GPU_QUANTISED: tuple[Precision, ...] = ("packed", "fp8", "w8a8")
"""Precisions of the Triton step whose matrices are quantised; all else is bfloat16."""

IN_PARTS: tuple[Precision, ...] = (*PLAIN, "int8", *ON_GPU_QUANTISED)
"""Precisions of a model that is dealt to parts; in int8, fp8 and w8a8 each part's own numbers are rounded."""

ON_CPU: tuple[Precision, ...] = ("fp32", "bf16", "int8", "gguf")
ON_GPU: tuple[Precision, ...] = (*PLAIN, *ON_GPU_QUANTISED)

_BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16"})
_BYTE_FEATURES = frozenset({"avx512_vnni"})
_SMALL_FILE = 1 << 30
"""Bytes of a file whose matrices may well take thirteen bits a number, in every worker."""


def plain_dtype(precision: Precision) -> torch.dtype | None:
    """Return the dtype of all that is not quantised in `precision`; None where that is not one dtype."""
    return torch.bfloat16 if precision in ON_GPU_QUANTISED else PLAIN.get(precision)


def plain_precision(dtype: torch.dtype) -> Precision:
    """Return the precision that stores every number in `dtype`. Raises UnsupportedModel where none does."""
    for precision, plain in PLAIN.items():
        if plain == dtype:
            return precision
    raise UnsupportedModel(f"dtype {dtype}: only float32, float16 and bfloat16 are computed")


def stored_dtype(precision: Precision) -> torch.dtype:
    """Return the torch dtype of keys, values and embedding in `precision`."""
    return PLAIN.get(precision, torch.bfloat16)


def choose_precision(
    *,
    quantised_file: bool,
    native: bool,
    cpu_features: Collection[str],
    on_gpu: bool = False,
    file_bytes: int = 0,
    kquants: bool = False,
    packs: bool = False,
    in_parts: bool = False,
) -> Precision:
    """Return what `auto` means: the fastest precision whose perplexity is within 1% of the file's own
    numbers'.

    Matrices in quantised blocks are computed in int8 where the CPU has dot products of bytes: with them
    prompts and steps of several streams are 1.1 to 1.8 times as fast as in the file's own blocks. These take
    a third of the memory, which counts for a large file, and are faster where such instructions are missing:
    gguf. What rounding costs is far below what the file's rounding has cost already in both (python -m
    lab.quality). K-quants are always computed in their blocks: int8 keeps none of their codes, and takes
    twice the file. A file of full numbers is computed in bf16, which changes least, where the CPU multiplies
    it; elsewhere in fp32, which is faster than bf16 that is widened first. Without the native step torch
    would only imitate the blocks. Blocks are not cut to parts: these are in int8, without codes. A GPU
    computes in bf16, of a quantised file that it `packs` with the file's codes.
    """
    if on_gpu:
        return "packed" if packs else "bf16"
    if quantised_file and native:
        small = file_bytes <= _SMALL_FILE and not kquants
        if (small or in_parts) and _BYTE_FEATURES.intersection(cpu_features):
            return "int8"
        if not in_parts:
            return "gguf"
    return "bf16" if _BF16_FEATURES.intersection(cpu_features) else "fp32"


def kept_dtype(choice: KVCacheDtype, precision: Precision) -> torch.dtype:
    """Return the torch dtype of keys and values in their blocks."""
    if choice == "int8":
        return int8_cache.DTYPE
    return fp8_cache.DTYPE if choice == "fp8" else stored_dtype(precision)


def kept_scales(choice: KVCacheDtype, shape: ModelShape, found: torch.Tensor | None) -> torch.Tensor | None:
    """Return float32 `[layers, 2, kv_heads]`: `found` in the checkpoint, or 1. None: nothing is scaled."""
    if choice != "fp8":
        return None
    return found if found is not None else torch.ones(shape.num_layers, 2, shape.num_kv_heads)
