"""Steps of 8B models with random weights in bf16: decode beside its roofline, prefill beside the GEMM rate.

A decode step is timed from call to token, the host's preparation included: nothing less can be served.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.ceilings import COPY, GEMM, READ
from benchmarks.gpu.random_model import LLAMA_3_8B, QWEN3_8B, matrix_elements, random_weights
from benchmarks.gpu.section import Context, Figure, figure, require_cuda
from engine.batch import SequenceStep
from engine.kv_memory import KVLayout, KVMemory
from engine.sampling import SampleRow, SamplingParams
from engine.shape import ModelShape
from engine.triton_backend import TritonBackend

SECTION = "model step"
_BLOCK = 16
_CONTEXT = 2048
_AT_LEAST = {1: 0.85, 64: 0.75}
"""Of the roofline, by batch."""
_CHUNK = 2048
_PROMPT = 8192


@dataclass(frozen=True)
class _Bench:
    """One model, ready."""

    name: str
    shape: ModelShape
    backend: TritonBackend
    memory: KVMemory


def model_step(context: Context) -> Iterator[Figure]:
    """Needs the ceilings."""
    device = require_cuda(context.device)
    for name, shape in (("Llama-3-8B", LLAMA_3_8B), ("Qwen3-8B", QWEN3_8B)):
        context.say(f"{name}: making weights, recording decode steps")
        bench = _make(name, shape, device)
        for batch in (1, 8, 64):
            yield _decode(context, bench, batch)
        yield _prefill(context, bench)
        del bench
        torch.cuda.empty_cache()
        if context.quick:
            return


def _make(name: str, shape: ModelShape, device: torch.device) -> _Bench:
    dtype = torch.bfloat16
    backend = TritonBackend(shape, random_weights(shape, device, dtype), device)
    torch.cuda.empty_cache()
    backend.plan_decode(64, _BLOCK)
    layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, _BLOCK, dtype)
    memory = KVMemory.on_device(layout, 64 * (_CONTEXT // _BLOCK + 8), device)
    memory.data.normal_()
    backend.prepare_decode(memory)
    return _Bench(name, shape, backend, memory)


def _decode(context: Context, bench: _Bench, batch: int) -> Figure:
    context.say(f"{bench.name}: decode, batch {batch}")
    shape, per_row = bench.shape, _CONTEXT // _BLOCK + 8
    blocks = list(range(bench.memory.num_blocks))
    random.Random(5).shuffle(blocks)
    tables = [blocks[per_row * row : per_row * (row + 1)] for row in range(batch)]
    rows = [SampleRow(SamplingParams(temperature=0.8, seed=row), (), (0,)) for row in range(batch)]

    def step(number: int) -> None:
        start = _CONTEXT + number % 64
        steps = [SequenceStep(bench.memory, table, start, [7], True) for table in tables]
        bench.backend.forward_and_draw(steps, rows, None)

    seconds = _times(step, 10 if context.quick else 50)
    median = statistics.median(seconds)
    element = bench.memory.layout.dtype.itemsize
    matrices = matrix_elements(shape)
    kept = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * _CONTEXT * batch
    bandwidth = max(context.needs(COPY), context.needs(READ))
    flops = 2 * batch * matrices + 4 * shape.num_layers * shape.num_heads * shape.head_dim * _CONTEXT * batch
    roof = max((matrices + kept) * element / bandwidth, flops / context.needs(GEMM))
    return figure(
        SECTION,
        f"{bench.name} decode step, batch {batch}, context {_CONTEXT}",
        median * 1e3,
        "ms",
        against="bytes of weights and KV over bandwidth, or operations over the GEMM rate",
        ratio=roof / median,
        at_least=_AT_LEAST.get(batch),
        note=f"{batch / median:.0f} tokens/s, {_spread(seconds)}, host included",
    )


def _prefill(context: Context, bench: _Bench) -> Figure:
    context.say(f"{bench.name}: prefill")
    shape = bench.shape
    table = range(_PROMPT // _BLOCK)
    tokens = [n % shape.vocab_size for n in range(_CHUNK)]

    def prompt(number: int) -> None:
        for start in range(0, _PROMPT, _CHUNK):
            last = start + _CHUNK == _PROMPT
            bench.backend.forward([SequenceStep(bench.memory, table, start, tokens, last)], None)

    seconds = _times(prompt, 3 if context.quick else 7)
    median = statistics.median(seconds)
    linear = 2 * _PROMPT * (matrix_elements(shape) - shape.vocab_size * shape.hidden_size)
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * _PROMPT**2
    return figure(
        SECTION,
        f"{bench.name} prefill of {_PROMPT} tokens in chunks of {_CHUNK}",
        _PROMPT / median,
        "tokens/s",
        against="bf16 GEMM rate",
        ratio=(linear + attention) / context.needs(GEMM) / median,
        note=_spread(seconds),
    )


def _times(work: Callable[[int], None], rounds: int) -> list[float]:
    """Seconds of each call after three that warm up; every call waits for the device itself."""
    for number in range(3):
        work(number)
    seconds = []
    for number in range(rounds):
        started = time.perf_counter()
        work(number)
        seconds.append(time.perf_counter() - started)
    return seconds


def _spread(seconds: Sequence[float]) -> str:
    quartiles = statistics.quantiles(seconds, n=4)
    return f"spread {100 * (quartiles[2] - quartiles[0]) / statistics.median(seconds):.1f}%"
