"""`python -m benchmarks.gpu.tune`: find the attention kernels' tile sizes on this GPU, and keep them.

Candidates are measured where the targets are: decode at batch 32 and 16K, prefill at 16K. What is found is
written to the file that kernels/gpu/tuning.py names, for the shapes of an 8B model in bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from unittest import mock

import torch

from benchmarks.gpu.paged_case import BLOCK_SIZE, HEAD_DIM, HEADS, KV_HEADS, paged_case, random_query
from benchmarks.gpu.section import Context, Unmeasured, device_of
from benchmarks.gpu.timing import Work, measure
from kernels.gpu.tuning import (
    Config,
    decode_candidates,
    keep,
    prefill_candidates,
    shape_class,
    tuning_file,
)

_TOKENS = 16_384


def tune(context: Context) -> None:
    """Measure all candidates of both kernels, keep the fastest of each. Raises Unmeasured without a GPU."""
    device = device_of(context)
    shapes = shape_class(HEAD_DIM, HEADS // KV_HEADS, BLOCK_SIZE, torch.bfloat16, torch.bfloat16)
    for operator, candidates, work in (
        ("paged_decode", decode_candidates(HEAD_DIM), _decode(device)),
        ("paged_prefill", prefill_candidates(HEAD_DIM), _prefill(device)),
    ):
        best = _fastest(context, operator, candidates, work)
        keep(device, operator, shapes, best)
        context.say(f"{operator}: {best}")


def _fastest(context: Context, operator: str, candidates: Iterable[Config], work: Work) -> Config:
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


def _decode(device: torch.device) -> Work:
    from kernels.gpu.decode_splits import make_scratch
    from kernels.gpu.paged_decode import paged_decode

    rows = 32
    case, query = paged_case(rows, _TOKENS, device), random_query(rows, device)
    lengths = torch.full((rows,), _TOKENS, dtype=torch.int32, device=device)
    scratch, out = make_scratch(rows, HEADS, HEAD_DIM, _TOKENS, device), torch.empty_like(query)
    return lambda: paged_decode(query, case.blocks, 0, case.tables, lengths, scratch=scratch, out=out)


def _prefill(device: torch.device) -> Work:
    from kernels.gpu.paged_prefill import paged_prefill

    case, query = paged_case(1, _TOKENS, device), random_query(_TOKENS, device)
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    offsets = torch.tensor([0, _TOKENS], dtype=torch.int32, device=device)
    out = torch.empty_like(query)
    return lambda: paged_prefill(
        query, case.blocks, 0, case.tables, starts, offsets, max_tokens=_TOKENS, out=out
    )


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
