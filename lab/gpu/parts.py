"""Decode steps of an 8B model in parts, computed by one process, beside the step of the whole model.

One part costs what a group's path costs by itself: it exchanges nothing. Two parts in one process are the
bits of two ranks, at the price of narrower products. Two ranks on cards of their own are measured by the
service (`python -m diptych.bench`, docs/parallel.md).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from diptych.engine.backends.triton.parts_backend import TritonPartsBackend
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel.parts import deal_parts
from diptych.engine.parallel.pipeline import ALONE
from diptych.engine.parallel.stages import deal_stages
from diptych.engine.parallel.stop_word import StopWord
from lab.gpu.adapted_steps import ADAPTED_AT_MOST, ADAPTERS, RANK, TARGETS, random_adapter
from lab.gpu.model_step import DRY, WHOLE, Bench, Sizes, decode_seconds, make, record, spread, tiny
from lab.gpu.random_model import LLAMA_3_8B, random_weights
from lab.gpu.section import Context, Figure, device_of, figure

SECTION = "parts"
_AT_LEAST = 0.98
"""Share of the whole model's speed that one part has: degree 1 costs nothing."""


def parts(context: Context) -> Iterator[Figure]:
    """Yield decode steps of one part and of two, by batch, and one with adapters of each."""
    device, sizes = device_of(context), context.pick(WHOLE, WHOLE, DRY)
    shape = tiny(LLAMA_3_8B) if context.dry else LLAMA_3_8B
    context.say("the whole model")
    bench = make("whole", shape, sizes, random_weights(shape, device, torch.bfloat16), device)
    whole = {batch: statistics.median(decode_seconds(context, bench, batch)[0]) for batch in sizes.batches}
    del bench
    for count in (1, 2):
        torch.cuda.empty_cache()
        context.say(f"{count} of its parts")
        yield from _in_parts(context, shape, sizes, count, whole)


def _in_parts(
    context: Context, shape: ModelShape, sizes: Sizes, count: int, whole: dict[int, float]
) -> Iterator[Figure]:
    device, dealt = device_of(context), deal_parts(shape, count)
    (stage,) = deal_stages(shape, 1)
    weights = [random_weights(part.shape_of(shape), device, torch.bfloat16) for part in dealt]
    backend = TritonPartsBackend(shape, dealt, weights, ALONE, stage, stop_word=StopWord(), device=device)
    del weights
    bench = record(f"{count} parts", shape, sizes, backend, device)
    base: dict[int, float] = {}
    for batch in sizes.batches:
        seconds, _ = decode_seconds(context, bench, batch)
        median = base[batch] = statistics.median(seconds)
        yield figure(
            SECTION,
            f"decode step in {count} part{'s' * (count > 1)}, batch {batch}, context {sizes.context}",
            median * 1e3,
            "ms",
            against="the step of the whole model",
            ratio=whole[batch] / median,
            at_least=_AT_LEAST if count == 1 else None,
            note=spread(seconds),
        )
    yield _adapted(context, bench, count, base)


def _adapted(context: Context, bench: Bench, count: int, base: dict[int, float]) -> Figure:
    """Return the time of a decode step whose rows have adapters, beside the same without."""
    backend, device = bench.backend, device_of(context)
    batch = next((rows for rows in base if rows >= ADAPTERS), max(base))
    if (why := backend.allow_adapters(ADAPTERS, RANK)) is not None:
        raise RuntimeError(why)
    for slot in range(ADAPTERS):
        adapter = random_adapter(bench.shape, TARGETS["all seven"], device)
        backend.set_adapter(slot, backend.prepare_adapter(adapter))
    seconds, _ = decode_seconds(context, bench, batch, ADAPTERS)
    median = statistics.median(seconds)
    return figure(
        SECTION,
        f"decode step in {count} part{'s' * (count > 1)}, batch {batch}, "
        f"{min(batch, ADAPTERS)} adapters of rank {RANK}, all seven",
        median * 1e3,
        "ms",
        against="the same without adapters",
        ratio=median / base[batch],
        at_most=ADAPTED_AT_MOST,
        note=spread(seconds),
    )
