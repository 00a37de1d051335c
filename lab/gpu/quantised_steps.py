"""Decode steps of an 8B shape in FP8 and 4 bits beside bf16, and of Qwen3-30B-A3B's beside its bytes.

Products alone are timed in quantised.py: here a whole recorded step is, with norms, attention and sampling.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from diptych.engine.batch import SequenceStep
from diptych.engine.models.shape import ModelShape
from diptych.engine.step_work import WorkArithmetic
from diptych.engine.weights.canonical import layer_shapes, layer_weights
from kernels.packed_matrix import pack
from kernels.scaled_matrix import FP8, quantise
from lab.gpu.ceilings import READ
from lab.gpu.model_step import DRY, WHOLE, Bench, decode_seconds, make, spread, tiny
from lab.gpu.qwen_moe import QWEN3_30B_A3B, tiny_moe
from lab.gpu.random_model import LLAMA_3_8B, random_weights
from lab.gpu.section import Context, Figure, Unmeasured, device_of, figure

SECTION, EXPERTS = "quantised steps", "expert steps"
_BATCHES = (1, 16, 64)
_AT_LEAST = {("4 bits", 1): 2.0}
"""Speed over that of bf16, by format and rows."""
Matrix = Callable[[tuple[int, ...]], Any]


def quantised_steps(context: Context) -> Iterator[Figure]:
    """Yield the steps of each format, those of bf16 first."""
    device = device_of(context)
    shape = tiny(LLAMA_3_8B) if context.dry else LLAMA_3_8B
    full: dict[int, float] = {}
    for name, matrix in (("bf16", None), ("FP8", _fp8), ("4 bits", _four_bits)):
        context.say(f"{name}: making weights, recording decode steps")
        weights = random_weights(shape, device, torch.bfloat16)
        if matrix is not None:
            weights = replace(weights, layers=_layers(shape, cache(matrix), device))
        bench = make(name, shape, DRY if context.dry else WHOLE, weights, device)
        del weights
        for batch in _batches(context, bench):
            seconds, _ = decode_seconds(context, bench, batch)
            median = statistics.median(seconds)
            full.setdefault(batch, median)
            yield figure(
                SECTION, f"8B in {name}, a step of {batch} rows", median * 1e3, "ms", against="bf16",
                ratio=full[batch] / median, at_least=_AT_LEAST.get((name, batch)), note=spread(seconds),
            )  # fmt: skip
        del bench
        _free(device)


def expert_steps(context: Context) -> Iterator[Figure]:
    """Yield steps beside the bytes that even choices of experts read; needs the read bandwidth.

    Raises Unmeasured, behind what was measured, where the card has no room for the weights twice.
    """
    device = device_of(context)
    shape = tiny_moe() if context.dry else QWEN3_30B_A3B
    context.say("making weights, recording decode steps")
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 130 << 30:
        raise Unmeasured(
            "61 GB of weights are made, and stacked beside that: this card has less than 130 GiB"
        )
    weights = random_weights(shape, device, torch.bfloat16)
    bench = make("Qwen3-30B-A3B", shape, DRY if context.dry else WHOLE, weights, device)
    del weights
    _free(device)
    backend = bench.backend
    arithmetic = WorkArithmetic(shape, bench.memory.layout, backend.weight_bytes, backend.expert_bytes)
    for batch in _batches(context, bench):
        seconds, _ = decode_seconds(context, bench, batch)
        median = statistics.median(seconds)
        step = SequenceStep(bench.memory, [0], bench.sizes.context, [7], True)
        least = arithmetic.of([step] * batch).read_bytes / context.needs(READ)
        yield figure(
            EXPERTS, f"{bench.name}, a step of {batch} rows", median * 1e3, "ms",
            against="bytes of weights and KV over the read rate, experts as by even choices",
            ratio=least / median, note=spread(seconds),
        )  # fmt: skip


def _batches(context: Context, bench: Bench) -> tuple[int, ...]:
    return context.pick(_BATCHES, _BATCHES, bench.sizes.batches)


def _layers(shape: ModelShape, matrix: Matrix, device: torch.device) -> Any:
    """Return layers that share the matrices of a size, in main memory: each gets a copy on the device."""
    norms = dict.fromkeys(("input_norm", "post_norm"))
    tensors = {
        name: torch.ones(size, dtype=torch.bfloat16, device=device) if name in norms else matrix(size)
        for name, size in layer_shapes(shape, 0)
    }
    return (layer_weights(shape, tensors),) * shape.num_layers


def _fp8(size: tuple[int, ...]) -> Any:
    return quantise(torch.randn(size).mul_(size[1] ** -0.5), FP8)


def _four_bits(size: tuple[int, ...]) -> Any:
    group = min(128, size[1])
    codes = torch.randint(0, 16, size, dtype=torch.uint8)
    scales = torch.full((size[0], size[1] // group), 0.22 * size[1] ** -0.5).half()
    return pack("int4", codes, scales, group, zero=8)


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
