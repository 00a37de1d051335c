"""Times steps of the engine: decode by batch and context, prefill by length."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import Model
from diptych.engine.runner import Runner

BLOCK_SIZE = 16
CHUNK = 512
_WARM_UPS = 2
_MOST_STEPS = 15
_POINT_SECONDS = 0.5
_LONG_SECONDS = 0.2


@dataclass(frozen=True)
class Point:
    """Figure of one point. `tokens` are of context for decode, of the prompt for prefill (batch 1)."""

    kind: Literal["decode", "prefill"]
    batch: int
    tokens: int
    seconds: float
    """Median of a step, or of a whole prompt."""
    fastest: float
    slowest: float
    steps: int


@dataclass(frozen=True)
class Grid:
    """Points to measure; decode points whose keys and values need more than `kv_bytes` are left out."""

    batches: Sequence[int]
    contexts: Sequence[int]
    prompts: Sequence[int]
    kv_bytes: int

    def decodes(self, model: Model) -> list[tuple[int, int]]:
        """(batch, context) of all points that fit."""
        layout = model.kv_layout(BLOCK_SIZE)
        return [
            (batch, context)
            for batch in self.batches
            for context in self.contexts
            if batch * layout.blocks_for(context) * layout.bytes_per_block <= self.kv_bytes
        ]


def measure(model: Model, grid: Grid, threads: int) -> Iterator[Point]:
    """Point by point, each with warm caches and threads."""
    runner = Runner(model, threads)
    layout = model.kv_layout(BLOCK_SIZE)
    decodes = grid.decodes(model)
    blocks = max(
        [batch * layout.blocks_for(context) for batch, context in decodes]
        + [layout.blocks_for(prompt) for prompt in grid.prompts]
    )
    memory = KVMemory(layout, blocks)
    _fill(memory)
    # Blocks of a sequence lie scattered, as in a pool that has been in use.
    order = list(range(blocks))
    random.Random(1).shuffle(order)
    for batch, context in decodes:
        yield _decode(runner, memory, order, batch, context)
    for prompt in grid.prompts:
        yield _prefill(runner, memory, order, prompt)


def _decode(runner: Runner, memory: KVMemory, order: Sequence[int], batch: int, context: int) -> Point:
    """Time the same step again and again: it writes its own position, and reads all those before it."""
    each = memory.layout.blocks_for(context)
    steps = [
        SequenceStep(memory, order[row * each : (row + 1) * each], context - 1, [row + 1], wants_logits=True)
        for row in range(batch)
    ]
    return _timed("decode", batch, context, lambda: runner.step(steps))


def _prefill(runner: Runner, memory: KVMemory, order: Sequence[int], prompt: int) -> Point:
    tokens = [1 + index % 1000 for index in range(prompt)]

    def whole() -> None:
        for start in range(0, prompt, CHUNK):
            end = min(prompt, start + CHUNK)
            runner.step([SequenceStep(memory, order, start, tokens[start:end], wants_logits=end == prompt)])

    return _timed("prefill", 1, prompt, whole)


def _timed(kind: Literal["decode", "prefill"], batch: int, tokens: int, work: Callable[[], object]) -> Point:
    """Return the median of as many runs as half a second holds: at most fifteen, one or two of long ones."""
    times: list[float] = []
    began = time.perf_counter()
    for number in range(_WARM_UPS + _MOST_STEPS):
        started = time.perf_counter()
        work()
        ended = time.perf_counter()
        # A long run needs no other to warm it up: its first layers do that.
        if number >= _WARM_UPS or ended - started > _LONG_SECONDS:
            times.append(ended - started)
        if times and ended - began >= _POINT_SECONDS:
            break
    return Point(kind, batch, tokens, statistics.median(times), min(times), max(times), len(times))


def _fill(memory: KVMemory) -> None:
    """Ordinary numbers everywhere: zeros and denormals would be computed at another speed."""
    one = torch.randn(memory.layout.block_shape, generator=torch.Generator().manual_seed(1))
    memory.data.copy_(one.to(memory.layout.dtype).expand_as(memory.data))
