"""The cost of verifying drafts at 8B shapes: steps of one sequence with 4, 8 and 16 rows beside one row.

A step of one row is recorded, as it is served; steps with drafts are launched kernel by kernel. So two times
are given: from the call to the tokens, and that of the kernels alone, by the profiler.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.sampling import SampleRow, SamplingParams
from lab.gpu.random_backend import RandomBackend, random_backend
from lab.gpu.random_model import LLAMA_3_8B
from lab.gpu.section import Context, Figure, figure

SECTION = "verification"
_AT_MOST = 1.1
_ROWS = (4, 8, 16)
Work = Callable[[], object]


def verification(context: Context) -> Iterator[Figure]:
    """Needs no other section."""
    context.say("Llama-3-8B: making weights, recording decode steps")
    made = random_backend(context, LLAMA_3_8B, 1)
    works = {"one row": _work(made, made.memory, 1)}
    aside = KVMemory.on_device(made.memory.layout, made.memory.num_blocks, made.backend.device)
    aside.data.normal_()  # over another memory nothing is recorded
    works["one row, not recorded"] = _work(made, aside, 1)
    for rows in context.pick(_ROWS, _ROWS, (3,)):
        works[f"{rows} rows in a chain"] = _work(made, aside, rows)
        works[f"{rows} rows in a tree"] = _work(made, aside, rows, tree=True)
    called, kernels = _called(works, context.pick(60, 20, 2)), _kernels(context, works)
    for name, seconds in called.items():
        busy = f"{kernels[name] * 1e3:.3f} ms of kernels" if name in kernels else "kernels were not timed"
        ratio = seconds / called["one row"]
        of_kernels = kernels[name] / kernels["one row"] if name in kernels else None
        yield figure(
            SECTION,
            f"{name}, from call to token",
            seconds * 1e3,
            "ms",
            against="one row as it is served",
            ratio=ratio,
            at_most=_AT_MOST if "rows" in name else None,
            note=busy,
        )
        if of_kernels is not None and name != "one row":
            yield figure(
                SECTION,
                f"{name}, kernels alone",
                kernels[name] * 1e3,
                "ms",
                against="one row as it is served",
                ratio=of_kernels,
                at_most=_AT_MOST if "rows" in name else None,
            )


def _work(made: RandomBackend, memory: KVMemory, rows: int, *, tree: bool = False) -> Work:
    """Return a step of one sequence with so many rows; in a tree of two branches a token."""
    parents = [-1, *((place - 1) // 2 for place in range(1, rows))] if tree else None
    tokens = [7 + place for place in range(rows)]
    step = SequenceStep(
        memory, made.table(0), made.context, tokens, wants_logits=True, trailing=rows, parents=parents
    )
    draws: Sequence[SampleRow] = [SampleRow(SamplingParams(temperature=0.0), (), ())] * rows
    return lambda: made.backend.forward_and_sample([step], draws, None)


def _called(works: Mapping[str, Work], rounds: int) -> dict[str, float]:
    """Return the median seconds of each, by turns after three rounds that warm up; a call waits for the
    device itself.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(3 + rounds):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            if number >= 3:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(ones) for name, ones in seconds.items()}


def _kernels(context: Context, works: Mapping[str, Work], calls: int = 5) -> dict[str, float]:
    """Return the seconds that kernels of each took, by the profiler; none in a dry run."""
    found: dict[str, float] = {}
    if context.dry:
        return found
    for name, work in works.items():
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(calls):
                work()
            torch.cuda.synchronize()
        microseconds = sum(event.self_device_time_total for event in seen.key_averages())
        if microseconds > 0:
            found[name] = microseconds * 1e-6 / calls
    return found if "one row" in found else {}
