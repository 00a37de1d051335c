"""`python -m lab.gpu.tune`: find the attention kernels' tile sizes on this GPU, and keep them.

Candidates are compiled by as many processes as there are cores (one takes a second or more, and there are
dozens), then measured one by one where the targets are: decode at batch 32 and 16K, prefill at 16K. What is
found is written to the file that kernels/gpu/tuning.py names, for the shapes of an 8B model in bfloat16.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from unittest import mock

import torch

from kernels.gpu.tuning import (
    Config,
    decode_candidates,
    keep,
    prefill_candidates,
    shape_class,
    tuning_file,
)
from lab.gpu.paged_case import BLOCK_SIZE, HEAD_DIM, HEADS, KV_HEADS, paged_case, random_query
from lab.gpu.section import Context, Unmeasured, device_of
from lab.gpu.timing import Work, measure

_TOKENS = 16_384
_COMPILED_TOKENS = 4096
"""Size whose dependent numbers are multiples of 16, as with the larger one: Triton compiles by that."""


def tune(context: Context) -> None:
    """Measure all candidates of both kernels, keep the fastest of each. Raises Unmeasured without a GPU."""
    device = device_of(context)
    shapes = shape_class(HEAD_DIM, HEADS // KV_HEADS, BLOCK_SIZE, torch.bfloat16, torch.bfloat16)
    candidates = {name: list(found(HEAD_DIM)) for name, (found, _) in _OPERATORS.items()}
    _compile(context, device, [(name, config) for name, configs in candidates.items() for config in configs])
    for operator, (_, make) in _OPERATORS.items():
        best = _fastest(context, operator, candidates[operator], make(device, _TOKENS))
        keep(device, operator, shapes, best)
        context.say(f"{operator}: {best}")


def _compile(context: Context, device: torch.device, jobs: Sequence[tuple[str, Config]]) -> None:
    """Run every candidate once, in processes of their own: what they compile stays in Triton's cache."""
    workers = min(len(jobs), os.cpu_count() or 1)
    context.say(f"compiling {len(jobs)} candidates in {workers} processes")
    # A CUDA context does not survive a fork.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(_run_once, [str(device)] * len(jobs), *zip(*jobs, strict=True)):
            pass


def _run_once(device: str, operator: str, config: Config) -> None:
    """Launch once, over as many tokens as make the same kernel; failures are reported when measured."""
    _, make = _OPERATORS[operator]
    work = make(torch.device(device), _COMPILED_TOKENS)
    with mock.patch(f"kernels.gpu.{operator}.look_up", _always(config)), contextlib.suppress(Exception):
        work()


def _fastest(context: Context, operator: str, candidates: Sequence[Config], work: Work) -> Config:
    found: list[tuple[float, Config]] = []
    for config in candidates:
        with mock.patch(f"kernels.gpu.{operator}.look_up", _always(config)):
            try:
                time = measure(context, {operator: work}, rounds=10)[operator]
            except Exception as error:
                # Too much shared memory, or nothing that this Triton compiles: not a candidate here.
                context.say(f"{operator} {config}: {type(error).__name__}")
                continue
        found.append((time.median_s, config))
        context.say(f"{operator} {config}: {time.median_s * 1e6:.1f} µs")
    if not found:
        raise Unmeasured(f"no configuration of {operator} runs")
    return min(found, key=lambda one: one[0])[1]


def _always(config: Config) -> Callable[..., Config]:
    return lambda *_: config


def _decode(device: torch.device, tokens: int) -> Work:
    from kernels.gpu.decode_splits import make_scratch
    from kernels.gpu.paged_decode import paged_decode

    rows = 32
    case, query = paged_case(rows, tokens, device), random_query(rows, device)
    lengths = torch.full((rows,), tokens, dtype=torch.int32, device=device)
    scratch, out = make_scratch(rows, HEADS, HEAD_DIM, tokens, device), torch.empty_like(query)
    return lambda: paged_decode(query, case.blocks, 0, case.tables, lengths, scratch=scratch, out=out)


def _prefill(device: torch.device, tokens: int) -> Work:
    from kernels.gpu.paged_prefill import paged_prefill

    case, query = paged_case(1, tokens, device), random_query(tokens, device)
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    offsets = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    out = torch.empty_like(query)
    return lambda: paged_prefill(
        query, case.blocks, 0, case.tables, starts, offsets, max_tokens=tokens, out=out
    )


_OPERATORS = {"paged_decode": (decode_candidates, _decode), "paged_prefill": (prefill_candidates, _prefill)}
"""Candidates by name: what is tried, and the work to measure on a device over so many tokens."""


def main() -> int:
    """Exit status 0, or 1 where there is no GPU."""
    context = Context(torch.device("cuda"), quick=False, say=lambda line: print(line, flush=True))
    try:
        tune(context)
    except Unmeasured as missing:
        print(missing, file=sys.stderr)
        return 1
    print(f"kept in {tuning_file()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
