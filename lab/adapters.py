"""Time of decode steps with LoRA adapters against the same steps without: python -m lab.adapters --help.

One native step is computed by turns with the base model alone and with its rows spread over adapters. CPU
time counts, of all threads, so that what else the machine does matters little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from diptych.engine.adapters.adapter import Adapter, Delta
from diptych.engine.batch import SequenceStep
from diptych.engine.dtype import ON_CPU
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import load_model
from diptych.engine.models.shape import ModelShape
from diptych.engine.runner import Runner
from diptych.engine.sampling import SampleRow, SamplingParams
from diptych.engine.weights.canonical import layer_shapes
from diptych.runtime.settings import resolve_model

TARGETS = {"qv": ("q", "v"), "qkvo": ("q", "k", "v", "o"), "all": ("q", "k", "v", "o", "gate", "up", "down")}
PROMPT = 64
"""Tokens of context of each row."""


def random_adapter(shape: ModelShape, rank: int, fields: Sequence[str], seed: int) -> Adapter:
    """Return an adapter with random numbers that changes `fields` of every layer a little."""
    generator = torch.Generator().manual_seed(seed)

    def delta(out: int, inner: int) -> Delta:
        a, b = (torch.randn(size, generator=generator) for size in ((rank, inner), (out, rank)))
        return Delta(a, b, 0.001)

    layers = []
    for index in range(shape.num_layers):
        sizes = dict(layer_shapes(shape, index))
        layers.append({field: delta(*sizes[field]) for field in fields if field in sizes})
    return Adapter(tuple(layers))


def steps(
    memory: KVMemory, blocks: int, rows: int, adapters: int, *, start: int, tokens: int
) -> list[SequenceStep]:
    """Return a step of `tokens` for each of `rows`; row r has adapter r modulo `adapters`, 0 for none."""
    tables = [range(row * blocks, (row + 1) * blocks) for row in range(rows)]
    return [
        SequenceStep(
            memory, table, start, [7 + row] * tokens, True, adapter=row % adapters if adapters else None
        )
        for row, table in enumerate(tables)
    ]


def timed(runner: Runner, step: list[SequenceStep]) -> float:
    """Return the seconds of CPU time of a greedy step."""
    rows = [SampleRow(SamplingParams(temperature=0.0), (), ()) for _ in step]
    began = time.process_time()
    runner.step_and_sample(step, rows)
    return time.process_time() - began


def measure(options: argparse.Namespace) -> None:
    """Measure and print a line for each set of targets."""
    path = resolve_model(options.model)
    model = load_model(path, options.dtype, backend="native")
    runner = Runner(model, options.threads)
    runner.allow_adapters(options.adapters, options.rank)
    layout = model.kv_layout(16)
    blocks = layout.blocks_for(PROMPT + 1)
    memory = KVMemory(layout, blocks * options.rows)
    runner.step(steps(memory, blocks, options.rows, 0, start=0, tokens=PROMPT))
    base = steps(memory, blocks, options.rows, 0, start=PROMPT, tokens=1)
    adapted = steps(memory, blocks, options.rows, options.adapters, start=PROMPT, tokens=1)
    for name in options.targets:
        for slot in range(options.adapters):
            made = random_adapter(model.shape, options.rank, TARGETS[name], seed=slot)
            runner.place_adapter(slot, runner.prepare_adapter(made))
        pairs = [(timed(runner, base), timed(runner, adapted)) for _ in range(options.rounds)][2:]
        ratios = sorted(without / with_ for without, with_ in pairs)
        plain, changed = (1e3 * statistics.median(part) for part in zip(*pairs, strict=True))
        tenth = len(ratios) // 10
        spread = f"{ratios[tenth]:.3f} to {ratios[-1 - tenth]:.3f}"
        print(
            f"{options.dtype} {name}: {plain:.2f} ms without, {changed:.2f} ms with; ratio "
            f"{statistics.median(ratios):.3f} ({spread})",
            flush=True,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--dtype", default="int8", choices=ON_CPU)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
