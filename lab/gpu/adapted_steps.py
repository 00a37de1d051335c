"""Decode steps with LoRA adapters beside the same without, at 8B shapes: eight adapters of rank 16, by turns.

Both are recorded, and timed from the call to the tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch

from diptych.engine.adapters.adapter import Adapter, Delta
from diptych.engine.batch import SequenceStep
from diptych.engine.models.shape import ModelShape
from diptych.engine.sampling import SampleRow, SamplingParams
from diptych.engine.weights.canonical import layer_shapes
from lab.gpu.random_backend import RandomBackend, random_backend
from lab.gpu.random_model import LLAMA_3_8B
from lab.gpu.section import Context, Figure, figure

SECTION = "adapted steps"
ADAPTED_AT_MOST = 1.15
"""Time of a step with adapters over the same without."""
ADAPTERS, RANK = 8, 16
TARGETS = {"q, v": ("q", "v"), "all seven": ("q", "k", "v", "o", "gate", "up", "down")}


def adapted_steps(context: Context) -> Iterator[Figure]:
    """Needs no other section."""
    batches = context.pick((1, 8, 16, 64), (8, 16), (2,))
    context.say("Llama-3-8B: making weights, recording decode steps")
    made = random_backend(context, LLAMA_3_8B, max(batches))
    if (why := made.backend.allow_adapters(ADAPTERS, RANK)) is not None:
        raise RuntimeError(why)
    for name, fields in TARGETS.items():
        for slot in range(ADAPTERS):
            made.backend.set_adapter(slot, random_adapter(made.shape, fields, made.backend.device))
        for batch in batches:
            base, adapted = _by_turns(made, batch, context.pick(60, 20, 2))
            ratio = statistics.median(a / b for a, b in zip(adapted, base, strict=True))
            yield figure(
                SECTION,
                f"batch {batch}, {min(batch, ADAPTERS)} adapters of rank {RANK}, {name}",
                statistics.median(adapted) * 1e3,
                "ms",
                against=f"no adapters: {statistics.median(base) * 1e3:.3f} ms",
                ratio=ratio,
                at_most=ADAPTED_AT_MOST,
                note=f"context {made.context}",
            )


def random_adapter(shape: ModelShape, fields: tuple[str, ...], device: torch.device) -> Adapter:
    """Return an adapter with random numbers on the device that changes `fields` of every layer a little."""

    def delta(out: int, inner: int) -> Delta:
        a, b = (
            torch.randn(size, dtype=torch.bfloat16, device=device) for size in ((RANK, inner), (out, RANK))
        )
        return Delta(a, b, 0.001)

    return Adapter(
        tuple(
            {
                field: delta(*size)
                for field, size in layer_shapes(shape, index)
                if field in fields and len(size) == 2
            }
            for index in range(shape.num_layers)
        )
    )


def _by_turns(made: RandomBackend, batch: int, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of steps without and with adapters, after three rounds that warm up."""
    draws = [SampleRow(SamplingParams(temperature=0.0), (), ())] * batch
    base, adapted = (
        [
            SequenceStep(
                made.memory,
                made.table(row),
                made.context,
                [7 + row],
                wants_logits=True,
                adapter=row % ADAPTERS if slots else None,
            )
            for row in range(batch)
        ]
        for slots in (False, True)
    )
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(3 + rounds):
        for ones, step in zip(seconds, (base, adapted), strict=True):
            started = time.perf_counter()
            made.backend.forward_and_sample(step, draws, None)
            if number >= 3:
                ones.append(time.perf_counter() - started)
    return seconds
