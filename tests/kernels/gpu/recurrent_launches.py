"""Launches of recurrent kernels at the sizes of models, for the compiler (hopper_compiler.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kernels.gpu.delta_rule import delta_rule
from kernels.gpu.selective_scan import selective_scan
from kernels.gpu.state_space import state_space
from kernels.recurrence import DeltaRule, ScanRule, SpaceRule
from kernels.state_pages import StateRuns

Launch = tuple[str, Callable[[], object]]
_ROWS = 130


def launches(quick: bool) -> Iterator[Launch]:
    """Yield launches with their names: rows, and chunks, in bfloat16 and float32."""
    kinds = (torch.bfloat16,) if quick else (torch.bfloat16, torch.float32)
    for dtype in kinds:
        yield from _delta("Qwen3-Next", 16, 32, 128, 128, dtype)
        yield from _space("Granite 4 H", 128, 64, 1, 128, dtype)
        yield from _scan("Jamba", 8192, 16, dtype)
        if not quick:
            yield from _delta("OLMo Hybrid", 30, 30, 96, 192, dtype)
            yield from _space("Falcon-H1", 32, 128, 1, 256, dtype)
            yield from _space("Nemotron-H", 128, 64, 8, 128, dtype)


def _runs(*, single: bool, based: bool, apart: int, sequences: int) -> StateRuns:
    """Return runs over an empty memory: what is launched is compiled alone. Tables begin `apart` numbers
    behind an aligned place.
    """
    few = torch.zeros(apart + sequences * 64, dtype=torch.int32)[apart:]
    table, live, base = few.view(-1, 64), few[:sequences].clone(), few[:2].long() if based else None
    pool, starts, more = torch.zeros(2, 4096), few[:sequences], few[: sequences + 1]
    if single:
        return StateRuns(pool, 4096, slice(0, 4), table, table, starts, live)
    return StateRuns(
        pool, 4096, slice(0, _ROWS), table, table, starts, live, more, more, starts, _ROWS, base
    )  # fmt: skip


def _both(name: str, launch: Callable[[StateRuns, int], object]) -> Iterator[Launch]:
    for what, rows, based, apart, sequences in (
        ("rows", 4, False, 0, 4),
        ("rows elsewhere", 4, False, 1, 4),
        ("chunks", _ROWS, False, 0, 4),
        ("chunks elsewhere", _ROWS, False, 1, 4),
        ("chunks of one elsewhere", _ROWS, False, 1, 1),
        ("recorded chunks", _ROWS, True, 0, 4),
    ):
        runs = _runs(single=rows == 4, based=based, apart=apart, sequences=sequences)
        yield f"{name} {what}", lambda runs=runs, rows=rows: launch(runs, rows)  # type: ignore[misc]


def _delta(
    name: str, key_heads: int, heads: int, keys: int, values: int, dtype: torch.dtype
) -> Iterator[Launch]:
    channels = 2 * key_heads * keys + heads * values
    few = torch.zeros(heads)
    rule = DeltaRule(key_heads, heads, keys, values, few, few, torch.zeros(values, dtype=dtype), 1e-6)
    conv = torch.zeros(_ROWS, channels)
    mixed = torch.zeros(_ROWS, channels + heads * values + 2 * heads, dtype=dtype)
    rooms = torch.zeros(_ROWS, heads * keys), torch.zeros(_ROWS, heads * 64)
    out = torch.zeros(_ROWS, heads * values, dtype=dtype)
    yield from _both(
        f"delta rule {name} {dtype}",
        lambda runs, rows: delta_rule(conv[:rows], mixed[:rows], rule, runs, 96, rooms=rooms, out=out[:rows]),
    )


def _space(
    name: str, heads: int, channels: int, groups: int, state: int, dtype: torch.dtype
) -> Iterator[Launch]:
    width, few = heads * channels, torch.zeros(heads)
    rule = SpaceRule(
        heads, channels, groups, state, few, few, few, (0.0, float("inf")), 1e-6,
        torch.zeros(width, dtype=dtype),
    )  # fmt: skip
    conv = torch.zeros(_ROWS, width + 2 * groups * state)
    mixed, out = torch.zeros(_ROWS, conv.shape[1] + width + heads, dtype=dtype), conv[:, :width].to(dtype)
    yield from _both(
        f"Mamba-2 {name} {dtype}",
        lambda runs, rows: state_space(conv[:rows], mixed[:rows], rule, runs, 96, out=out[:rows]),
    )


def _scan(name: str, width: int, state: int, dtype: torch.dtype) -> Iterator[Launch]:
    few = torch.zeros(width)
    rule = ScanRule(width, state, torch.zeros(width, state), few, few)
    x, steps = torch.zeros(_ROWS, width), torch.zeros(_ROWS, width, dtype=dtype)
    read, gate = torch.zeros(_ROWS, 2 * state), torch.zeros(_ROWS, 2 * width, dtype=dtype)[:, width:]
    b, c = read.chunk(2, dim=1)
    yield from _both(
        f"Mamba {name} {dtype}",
        lambda runs, rows: selective_scan(
            x[:rows], steps[:rows], b[:rows], c[:rows], gate[:rows], rule, runs, 96, out=steps[:rows]
        ),
    )
