"""How a model's numbers are kept and multiplied: what `--dtype` chooses.

fp32   everything float32: the oracle that the others are judged by
bf16   weights, inputs of products, keys and values bfloat16; sums float32
int8   matrices in blocks of 32 with 8 bits a number, inputs of products quantised to 8 bits in groups of 32;
       embedding, keys and values bfloat16, all else float32
gguf   the same with the blocks of the GGUF file as they are (Q4_0, Q4_1, Q8_0); matrices of other formats
       become int8
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "int8", "gguf"]

PLAIN: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Those that store every number in one dtype."""

_BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16"})


def stored_dtype(precision: Precision) -> torch.dtype:
    """Of keys, values and embedding."""
    return PLAIN.get(precision, torch.bfloat16)


def choose_precision(cpu_features: Collection[str]) -> Precision:
    """What `auto` means: the fastest precision that also keeps the greedy text, not only the perplexity.

    All of them stay within 1% of the perplexity of the file's own numbers (benchmarks/results, quality), but
    quantised inputs of products turn 3 to 4 of 100 likeliest tokens where bf16 turns fewer than 1, and with a
    small model that shows: the bundled one, asked for the capital of France, then begins with another word
    and does not come back. So whoever wants the speed of int8 or gguf says so. bf16 where the CPU multiplies
    it; elsewhere fp32, which is faster than bf16 that is widened first.
    """
    return "bf16" if _BF16_FEATURES.intersection(cpu_features) else "fp32"
