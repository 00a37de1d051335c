"""Cost of `--batch-invariant`, and whether a card keeps its promise, on an 8B shape in bf16."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from diptych.engine.batch import SequenceStep
from diptych.engine.sampling import SampleRow, SamplingParams
from lab.gpu.random_backend import RandomBackend, random_backend
from lab.gpu.random_model import LLAMA_3_8B
from lab.gpu.section import Context, Figure, device_of, figure

SECTION = "batch invariance"
DEFAULT, INVARIANT = "default", "batch-invariant"
_BATCHES = (1, 8, 16, 64)
_CHECKED = 5


def batch_invariance(context: Context) -> Iterator[Figure]:
    """Yield what tiles agree on this card, the forms of a token that differ, and times of both modes."""
    from kernels.gpu.invariant_linear import proven_tiles

    device = device_of(context)
    batches = context.pick(_BATCHES, (1, 64), (2,))
    context.say("making two models, recording decode steps")
    benches = {
        name: random_backend(context, LLAMA_3_8B, max(batches), batch_invariant=name == INVARIANT)
        for name in (DEFAULT, INVARIANT)
    }
    depth = benches[INVARIANT].shape.hidden_size
    agreeing = len(proven_tiles(device, torch.bfloat16, depth))
    yield figure(SECTION, "tiles of products whose bits agree", agreeing, "tiles", at_least=3)
    for name, bench in benches.items():
        found = forms_that_differ(bench, max(batches))
        bound = 0 if name == INVARIANT else None
        yield figure(
            SECTION, f"{name}: forms of a token that differ from it alone", len(found), "forms",
            at_most=bound, note=", ".join(found),
        )  # fmt: skip
    for batch in batches:
        yield from _beside(
            context, f"decode step of {batch}, context {benches[DEFAULT].context}",
            {name: _decode(bench, batch) for name, bench in benches.items()},
        )  # fmt: skip
    tokens = context.pick(2048, 2048, 20)
    yield from _beside(
        context, f"prompt of {tokens}", {name: _prompt(bench, tokens) for name, bench in benches.items()}
    )


def forms_that_differ(bench: RandomBackend, rows: int) -> list[str]:
    """Return the ways to compute the last tokens of a prompt whose logits are not those of single steps."""
    vocab, memory, length = bench.shape.vocab_size, bench.memory, min(bench.context, 300)
    ids = [(7919 * place + 11) % vocab for place in range(length)]
    first = length - _CHECKED

    def step(row: int, begin: int, end: int, trailing: int = 1) -> SequenceStep:
        return SequenceStep(memory, bench.table(row), begin, ids[begin:end], trailing > 0, max(1, trailing))

    def run(steps: list[SequenceStep]) -> torch.Tensor:
        return bench.backend.forward(steps, None)

    def in_steps(others: int) -> torch.Tensor:
        run([step(0, 0, first)])
        beside = [step(row, first, first + 1) for row in range(1, others)]
        return torch.stack([run([*beside, step(0, place, place + 1)])[-1] for place in range(first, length)])

    alone = in_steps(1)
    found = {
        "in a whole prompt": run([step(0, 0, length, _CHECKED)]),
        f"in a batch of {rows}": in_steps(rows),
        "as checked drafts": (run([step(0, 0, first)]), run([step(0, first, length, _CHECKED)]))[1],
    }
    return [name for name, logits in found.items() if not torch.equal(logits, alone)]


def _decode(bench: RandomBackend, batch: int) -> Callable[[], object]:
    steps = [SequenceStep(bench.memory, bench.table(row), bench.context, [7], True) for row in range(batch)]
    draws = [SampleRow(SamplingParams(temperature=0.0), (), ()) for _ in range(batch)]
    return lambda: bench.backend.forward_and_sample(steps, draws, None)


def _prompt(bench: RandomBackend, tokens: int) -> Callable[[], object]:
    ids = [place % bench.shape.vocab_size for place in range(tokens)]
    return lambda: bench.backend.forward([SequenceStep(bench.memory, bench.table(0), 0, ids, True)], None)


def _beside(context: Context, name: str, works: dict[str, Callable[[], object]]) -> Iterator[Figure]:
    """Yield the median of the mode beside the default's, run by turns after three turns that warm up."""
    context.say(name)
    seconds: dict[str, list[float]] = {mode: [] for mode in works}
    for number in range(context.pick(23, 11, 4)):
        for mode, work in works.items():
            begin = time.perf_counter()
            work()
            if number > 2:
                seconds[mode].append(time.perf_counter() - begin)
    medians = {mode: statistics.median(found) for mode, found in seconds.items()}
    yield figure(
        SECTION, name, medians[INVARIANT] * 1e3, "ms", against=f"the {DEFAULT} step",
        ratio=medians[DEFAULT] / medians[INVARIANT], note=f"{DEFAULT} {medians[DEFAULT] * 1e3:.2f} ms",
    )  # fmt: skip
