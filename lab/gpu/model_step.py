"""Steps of 8B models with random weights in bf16: decode beside its roofline, prefill beside the GEMM rate.

A decode step is timed as it is served: the next one is laid out and launched while the device computes, and
the host reads the tokens of the one before. Beside it, from call to token with nothing launched ahead.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.backends.triton.parts_backend import TritonPartsBackend
from diptych.engine.batch import Launched, SequenceStep
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.models.shape import ModelShape, Rotation
from diptych.engine.sampling import SampleRow, SamplingParams
from diptych.engine.weights import Weights
from lab.gpu.ceilings import COPY, GEMM, READ
from lab.gpu.random_model import LLAMA_3_8B, QWEN3_8B, matrix_elements, random_weights
from lab.gpu.section import Context, Figure, device_of, figure

SECTION = "model step"
_BLOCK = 16
_AT_LEAST = {1: 0.80, 8: 0.80, 16: 0.80, 64: 0.80}
"""Share of the roofline, by batch."""


@dataclass(frozen=True)
class Sizes:
    """Rows of decode steps and their context; a prompt's tokens, and those of a chunk of it."""

    batches: tuple[int, ...]
    context: int
    prompt: int
    chunk: int

    @property
    def blocks_a_row(self) -> int:
        """Blocks of one row, with room for the steps that are timed."""
        return self.context // _BLOCK + 8


WHOLE = Sizes(batches=(1, 8, 16, 64), context=2048, prompt=8192, chunk=2048)
DRY = Sizes(batches=(2,), context=20, prompt=32, chunk=16)
_STEPS = 64
"""Positions after the context that steps are timed at, in turn."""


@dataclass(frozen=True)
class Bench:
    """Model that is ready to be measured."""

    name: str
    shape: ModelShape
    sizes: Sizes
    backend: TritonBackend | TritonPartsBackend
    memory: KVMemory


def model_step(context: Context) -> Iterator[Figure]:
    """Needs the ceilings."""
    device = device_of(context)
    sizes = context.pick(WHOLE, WHOLE, DRY)
    for name, shape in (("Llama-3-8B", LLAMA_3_8B), ("Qwen3-8B", QWEN3_8B)):
        context.say(f"{name}: making weights, recording decode steps")
        shape = tiny(shape) if context.dry else shape
        bench = make(name, shape, sizes, random_weights(shape, device, torch.bfloat16), device)
        for batch in sizes.batches:
            yield _decode(context, bench, batch)
        yield _prefill(context, bench)
        del bench
        torch.cuda.empty_cache()
        if context.quick or context.dry:
            return


def tiny(shape: ModelShape) -> ModelShape:
    """Return the shape in the sizes of a dry run."""
    return replace(
        shape, vocab_size=99, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16,
        intermediate_size=48, max_context=64, layers=shape.layers[:1], rotations=(Rotation(1e4, 16),),
    )  # fmt: skip


def make(name: str, shape: ModelShape, sizes: Sizes, weights: Weights, device: torch.device) -> Bench:
    """Put `weights` on the device and record decode steps over a memory of random numbers."""
    return record(name, shape, sizes, TritonBackend(shape, weights, device), device)


def record(
    name: str,
    shape: ModelShape,
    sizes: Sizes,
    backend: TritonBackend | TritonPartsBackend,
    device: torch.device,
) -> Bench:
    """Record decode steps of `backend` over a memory of random numbers."""
    dtype = torch.bfloat16
    if device.type == "cuda":
        torch.cuda.empty_cache()
    rows = max(sizes.batches)
    backend.plan_decode(rows, _BLOCK)
    layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, _BLOCK, dtype)
    blocks = max(rows * sizes.blocks_a_row, layout.blocks_for(sizes.prompt))
    memory = KVMemory.on_device(layout, blocks, device)
    memory.data.normal_()
    backend.prepare_decode(memory)
    return Bench(name, shape, sizes, backend, memory)


def decode_seconds(
    context: Context, bench: Bench, batch: int, adapters: int = 0
) -> tuple[list[float], float]:
    """Return the seconds of decode steps of `batch` rows, each launched while the one before is computed,
    and the median with nothing ahead.

    Rows have the adapters in the first `adapters` slots by turns, which were placed before.
    """
    shape, sizes, per_row = bench.shape, bench.sizes, bench.sizes.blocks_a_row
    steps = min(_STEPS, shape.max_context - sizes.context)
    blocks = list(range(bench.memory.num_blocks))
    random.Random(5).shuffle(blocks)
    tables = [blocks[per_row * row : per_row * (row + 1)] for row in range(batch)]
    rows = [SampleRow(SamplingParams(temperature=0.8, seed=row), (), (0,)) for row in range(batch)]

    def laid_out(number: int, *, follow: bool) -> list[SequenceStep]:
        start = sizes.context + number % steps
        return [
            SequenceStep(
                bench.memory,
                table,
                start,
                [7],
                True,
                follows=row if follow else None,
                adapter=row % adapters if adapters else None,
            )
            for row, table in enumerate(tables)
        ]

    launched: list[Launched] = []

    def ahead(number: int) -> None:
        """Launch a step, and collect the one before."""
        step = bench.backend.launch(laid_out(number, follow=bool(launched)), rows, None)
        if step is None:
            raise RuntimeError("a decode step was not recorded")
        launched.append(step)
        if len(launched) > 1:
            launched.pop(0).collect()

    rounds = context.pick(50, 10, 2)
    alone = statistics.median(
        _times(
            lambda number: bench.backend.forward_and_sample(laid_out(number, follow=False), rows, None),
            rounds,
        )
    )
    seconds = _times(ahead, rounds)
    launched.pop().collect()
    return seconds, alone


def _decode(context: Context, bench: Bench, batch: int) -> Figure:
    context.say(f"{bench.name}: decode, batch {batch}")
    shape, sizes = bench.shape, bench.sizes
    seconds, alone = decode_seconds(context, bench, batch)
    median = statistics.median(seconds)
    element = bench.memory.layout.dtype.itemsize
    matrices = matrix_elements(shape)
    kept = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * sizes.context * batch
    bandwidth = max(context.needs(COPY), context.needs(READ))
    scores = 4 * shape.num_layers * shape.num_heads * shape.head_dim * sizes.context
    flops = batch * (2 * matrices + scores)
    roof = max((matrices + kept) * element / bandwidth, flops / context.needs(GEMM))
    return figure(
        SECTION,
        f"{bench.name} decode step, batch {batch}, context {sizes.context}",
        median * 1e3,
        "ms",
        against="bytes of weights and KV over bandwidth, or operations over the GEMM rate",
        ratio=roof / median,
        at_least=_AT_LEAST.get(batch),
        note=f"{batch / median:.0f} tokens/s, {spread(seconds)}; {alone * 1e3:.3f} ms with nothing ahead",
    )


def prefill_seconds(context: Context, bench: Bench) -> list[float]:
    """Return the seconds of a prompt, chunk by chunk, in each round."""
    length, chunk = bench.sizes.prompt, bench.sizes.chunk
    table = range(length // _BLOCK)
    tokens = [n % bench.shape.vocab_size for n in range(chunk)]

    def prompt(number: int) -> None:
        for start in range(0, length, chunk):
            last = start + chunk == length
            bench.backend.forward([SequenceStep(bench.memory, table, start, tokens, last)], None)

    return _times(prompt, context.pick(7, 3, 2))


def _prefill(context: Context, bench: Bench) -> Figure:
    context.say(f"{bench.name}: prefill")
    shape, length, chunk = bench.shape, bench.sizes.prompt, bench.sizes.chunk
    seconds = prefill_seconds(context, bench)
    median = statistics.median(seconds)
    linear = 2 * length * (matrix_elements(shape) - shape.vocab_size * shape.hidden_size)
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * length**2
    return figure(
        SECTION,
        f"{bench.name} prefill of {length} tokens in chunks of {chunk}",
        length / median,
        "tokens/s",
        against="bf16 GEMM rate",
        ratio=(linear + attention) / context.needs(GEMM) / median,
        note=spread(seconds),
    )


def _times(work: Callable[[int], object], rounds: int) -> list[float]:
    """Seconds of each call after three that warm up; every call waits for the device itself."""
    for number in range(3):
        work(number)
    seconds = []
    for number in range(rounds):
        started = time.perf_counter()
        work(number)
        seconds.append(time.perf_counter() - started)
    return seconds


def spread(seconds: Sequence[float]) -> str:
    """Return the middle half of the times over their median, in words."""
    quartiles = statistics.quantiles(seconds, n=4)
    return f"spread {100 * (quartiles[2] - quartiles[0]) / statistics.median(seconds):.1f}%"
