"""Kernels of recurrent layers at the sizes of models, each beside the bytes that it cannot but move.

A decode row reads and writes its layer's state, and little else; a prompt's tokens read and write what the
convolution gave. Ratios are to the copy bandwidth, so that they say for prompts how far products are the
bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernels.recurrence import DELTA_CHUNK, DeltaRule, ScanRule, SpaceRule
from kernels.state_pages import StateRuns
from lab.gpu.ceilings import COPY
from lab.gpu.section import Context, Figure, device_of, figure
from lab.gpu.timing import measure

SECTION = "recurrent"
_BF16 = torch.bfloat16
_BLOCK_FLOATS = 1 << 16
_ROWS_TARGET = 0.7


@dataclass(frozen=True)
class Layer:
    """A layer's recurrence: what it moves, and how it is launched."""

    name: str
    state: int
    """Floats of a sequence's state."""
    given: int
    """Bytes a token that are read and written beside it."""
    make: Callable[[int, torch.device], Callable[[StateRuns], object]]
    """Makes the launch over so many tokens."""


def recurrent(context: Context) -> Iterator[Figure]:
    """Figures of one token each of several streams, and of a prompt, for each kind of layer."""
    device = device_of(context)
    for layer in layers(dry=context.dry):
        for rows in context.pick((1, 8, 64), (64,), (2,)):
            yield _timed(context, layer, _rows_of(layer, rows, device), rows, 2 * 4 * layer.state * rows)
        for tokens in context.pick((512, 8192), (8192,), (70,)):
            yield _timed(context, layer, _prompt_of(layer, tokens, device), tokens, 2 * 4 * layer.state)


def layers(*, dry: bool) -> list[Layer]:
    """Return a layer of each kind, at a model's sizes or at tiny ones."""
    if dry:
        return [_delta("delta rule", 1, 2, 16, 16), _space("Mamba-2", 2, 16, 1, 16), _scan("Mamba", 32, 4)]
    return [
        _delta("delta rule, Qwen3-Next", 16, 32, 128, 128),
        _space("Mamba-2, Granite 4 H Small", 128, 64, 1, 128),
        _scan("Mamba, Jamba", 8192, 16),
    ]


def _timed(context: Context, layer: Layer, runs: StateRuns, tokens: int, state_bytes: int) -> Figure:
    what = f"{layer.name}, {'rows' if runs.offsets is None else 'a prompt'} of {tokens} tokens"
    context.say(what)
    launch = layer.make(tokens, runs.live.device)
    time = measure(context, {"kernel": lambda: launch(runs)})["kernel"]
    rate = (state_bytes + tokens * layer.given) / time.median_s
    single = runs.offsets is None and tokens >= 64
    return figure(
        SECTION, what, time.median_s * 1e6, "µs", against="copy bandwidth", ratio=rate / context.needs(COPY),
        at_least=_ROWS_TARGET if single else None, note=f"{rate / 1e12:.2f} TB/s, {time.note()}",
    )  # fmt: skip


def _pages(layer: Layer, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a memory, and pages in it whose blocks lie scattered."""
    blocks = -(-layer.state // _BLOCK_FLOATS)
    pool = torch.zeros(count * blocks, _BLOCK_FLOATS, device=device)
    return pool, torch.randperm(count * blocks, device=device).int().view(count, blocks)


def _rows_of(layer: Layer, rows: int, device: torch.device) -> StateRuns:
    pool, pages = _pages(layer, rows, device)
    ones = torch.ones(rows, dtype=torch.int32, device=device)
    return StateRuns(pool, _BLOCK_FLOATS, slice(0, rows), pages, pages, ones, ones)


def _prompt_of(layer: Layer, tokens: int, device: torch.device) -> StateRuns:
    pool, pages = _pages(layer, 1, device)

    def ints(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    return StateRuns(
        pool, _BLOCK_FLOATS, slice(0, tokens), pages, pages, ints(1), ints(1), ints(0, tokens), ints(0, 1),
        ints(tokens), tokens,
    )  # fmt: skip


def _delta(name: str, key_heads: int, heads: int, keys: int, values: int) -> Layer:
    channels, wide = 2 * key_heads * keys + heads * values, heads * values

    def make(tokens: int, device: torch.device) -> Callable[[StateRuns], object]:
        from kernels.gpu.delta_rule import delta_rule

        few, norm = torch.zeros(heads, device=device), torch.ones(values, device=device, dtype=_BF16)
        rule = DeltaRule(key_heads, heads, keys, values, few, few, norm, 1e-6)
        conv = torch.randn(tokens, channels, device=device)
        mixed = torch.randn(tokens, channels + wide + 2 * heads, device=device).to(_BF16)
        room, within = (torch.empty(tokens, heads * width, device=device) for width in (keys, DELTA_CHUNK))
        out = torch.empty(tokens, wide, device=device, dtype=_BF16)
        return lambda runs: delta_rule(conv, mixed, rule, runs, 0, rooms=(room, within), out=out)

    return Layer(name, heads * keys * values, 4 * channels + 2 * 2 * wide, make)


def _space(name: str, heads: int, channels: int, groups: int, state: int) -> Layer:
    width = heads * channels
    inner = width + 2 * groups * state

    def make(tokens: int, device: torch.device) -> Callable[[StateRuns], object]:
        from kernels.gpu.state_space import state_space

        few, norm = torch.zeros(heads, device=device), torch.ones(width, device=device, dtype=_BF16)
        bounds = (0.0, float("inf"))
        rule = SpaceRule(heads, channels, groups, state, -few - 1, few, few, bounds, 1e-6, norm)
        conv = torch.randn(tokens, inner, device=device)
        mixed = torch.randn(tokens, width + inner + heads, device=device).to(_BF16)
        out = torch.empty(tokens, width, device=device, dtype=_BF16)
        return lambda runs: state_space(conv, mixed, rule, runs, 0, out=out)

    return Layer(name, heads * channels * state, 4 * inner + 2 * 2 * width, make)


def _scan(name: str, width: int, state: int) -> Layer:
    def make(tokens: int, device: torch.device) -> Callable[[StateRuns], object]:
        from kernels.gpu.selective_scan import selective_scan

        few = torch.zeros(width, device=device)
        rule = ScanRule(width, state, -torch.ones(width, state, device=device), few, few)
        x, b, c = (torch.randn(tokens, size, device=device) for size in (width, state, state))
        steps, gate, out = (torch.randn(tokens, width, device=device).to(_BF16) for _ in range(3))
        return lambda runs: selective_scan(x, steps, b, c, gate, rule, runs, 0, out=out)

    return Layer(name, width * state, (4 + 2 + 2 + 2) * width + 8 * state, make)
