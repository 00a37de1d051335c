"""How a model's numbers are kept and multiplied: what `--dtype` chooses.

fp32   everything float32: the oracle that the others are judged by
fp16   as bf16, in float16; on GPUs only
bf16   weights, inputs of products, keys and values bfloat16; sums float32
int8   matrices with 8 bits a number and a scale for at most 256 of them; inputs of products likewise, but for
       the four widest lines of each 256, which have 16 bits (kernels/byte_linear.py); embedding, keys and
       values bfloat16, all else float32
gguf   matrices in the blocks of the GGUF file as they are (Q4_0, Q4_1, Q8_0), others become Q8_0; inputs of
       products in groups of 32, with 8 bits or 16; the rest as in int8 (kernels/quantised_linear.py)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch

Precision = Literal["fp32", "fp16", "bf16", "int8", "gguf"]

PLAIN: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
"""Those that store every number in one dtype."""

ON_CPU: tuple[Precision, ...] = ("fp32", "bf16", "int8", "gguf")
ON_GPU: tuple[Precision, ...] = ("fp32", "fp16", "bf16")

_BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16"})


def stored_dtype(precision: Precision) -> torch.dtype:
    """Of keys, values and embedding."""
    return PLAIN.get(precision, torch.bfloat16)


def choose_precision(
    *, quantised_file: bool, native: bool, cpu_features: Collection[str], on_gpu: bool = False
) -> Precision:
    """What `auto` means: the fastest precision whose perplexity is within 1% of the file's own numbers'.

    A GGUF file with quantised matrices is computed in its own blocks: a quarter of bf16's bytes at every
    step, and what rounding the products' inputs costs is far below what the file's rounding has cost already
    (python -m benchmarks.quality). A file of full numbers is computed in bf16, which changes least, where the
    CPU multiplies it; elsewhere in fp32, which is faster than bf16 that is widened first. Without the native
    step torch would only imitate the blocks. A GPU computes in bf16, whatever the file.
    """
    if on_gpu:
        return "bf16"
    if quantised_file and native:
        return "gguf"
    return "bf16" if _BF16_FEATURES.intersection(cpu_features) else "fp32"
