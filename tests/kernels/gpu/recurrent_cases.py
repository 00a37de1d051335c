"""Launches of the kernels of recurrent layers that are compiled without a GPU (hopper_compiler.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kernels.state_pages import StateRuns

Case = tuple[str, Callable[[], object]]


def state_runs(rows: int, *, chunks: bool, based: bool, blocks: int = 20, apart: int = 0) -> StateRuns:
    """Return runs of `rows` sequences of one row, or of one sequence with as many; tables begin `apart`
    numbers behind an aligned place.
    """
    sequences = 1 if chunks else rows
    numbers = torch.zeros(apart + sequences + 1, dtype=torch.int32)[apart:]
    tables = torch.zeros(apart + 2 * rows * blocks, dtype=torch.int32)[apart:].view(-1, blocks)
    tables = tables[: 2 if chunks else rows]
    more = (numbers, numbers, numbers, rows) if chunks else (None, None, None, 1)
    return StateRuns(
        torch.zeros(4, 4096), 4096, slice(0, rows), tables[:sequences], tables, numbers[:sequences],
        numbers[:sequences].clone(), *more, torch.zeros(1, dtype=torch.int64) if based else None,
    )  # fmt: skip


def recurrent_cases() -> Iterator[Case]:
    """Yield launches by name."""
    from kernels.gpu.causal_conv import causal_conv, short_conv
    from kernels.gpu.state_pages import begin_states, end_states

    for name, runs in (
        ("decode", state_runs(16, chunks=False, based=False)),
        ("decode elsewhere", state_runs(16, chunks=False, based=False, apart=1)),
        ("chunks", state_runs(512, chunks=True, based=False)),
        ("chunks elsewhere", state_runs(512, chunks=True, based=False, apart=1)),
        ("recorded chunks", state_runs(512, chunks=True, based=True)),
    ):
        rows = runs.rows.stop
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.zeros(rows, 3 * 2048, dtype=dtype)
            weight, bias = torch.zeros(2048, 3, dtype=dtype), torch.zeros(2048, dtype=dtype)
            out = torch.zeros(rows, 2048, dtype=dtype)
            yield (
                f"short convolution, {name}, {dtype}",
                lambda x=x, weight=weight, runs=runs, out=out: short_conv(x, weight, None, runs, 64, out=out),
            )
            yield (
                f"convolution, {name}, {dtype}",
                lambda x=x, weight=weight, bias=bias, runs=runs, rows=rows: causal_conv(
                    x[:, :2048], weight, bias, runs, 64, silu=True, out=torch.zeros(rows, 2048)
                ),
            )
        hidden = torch.zeros(rows, 2048, dtype=torch.bfloat16)
        yield f"begin states, {name}", lambda runs=runs: begin_states(runs)
        yield f"end states, {name}", lambda runs=runs, hidden=hidden: end_states(runs, hidden)
