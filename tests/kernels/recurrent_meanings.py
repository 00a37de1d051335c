"""The operators of recurrent layers as their torch meanings, over states in pages, for tests."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.nn import functional

from diptych.engine.backends.torch.recurrent.causal_conv import causal_conv
from diptych.engine.backends.torch.recurrent.delta_rule import delta_rule
from diptych.engine.backends.torch.recurrent.norms import group_norm, unit_rows
from diptych.engine.backends.torch.recurrent.selective_scan import selective_scan
from diptych.engine.backends.torch.recurrent.state_space import state_space
from kernels.recurrence import DeltaRule, PieceRows, RowPages, ScanRule, SpaceRule, StatePages

Rows = RowPages | PieceRows
Shape = tuple[int, ...]


def read_state(pages: StatePages, table: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Return the state `shape` of the page whose blocks are `table`; zeros where there is no page."""
    if int(table[0]) < 0:
        return torch.zeros(shape)
    at = pages.begin + torch.arange(math.prod(shape))
    return pages.memory[table.long()[at // pages.block_floats], at % pages.block_floats].view(shape)


def write_state(pages: StatePages, table: torch.Tensor, state: torch.Tensor) -> None:
    """Write a state to the page whose blocks are `table`; nothing where there is no page."""
    if int(table[0]) >= 0:
        at = pages.begin + torch.arange(state.numel())
        blocks = table.long()[at // pages.block_floats]
        pages.memory[blocks, at % pages.block_floats] = state.flatten()


def runs(rows: Rows, count: int) -> Iterator[tuple[torch.Tensor, list[tuple[slice, torch.Tensor]]]]:
    """Yield each sequence's table of the state before, and its pieces' rows with the tables behind them."""
    if isinstance(rows, RowPages):
        for row in range(count):
            yield rows.read[row], [(slice(row, row + 1), rows.written[row])]
        return
    firsts, offsets = rows.firsts.tolist(), rows.offsets.tolist()
    for sequence in range(len(rows.read)):
        numbers = range(firsts[sequence], firsts[sequence + 1])
        pieces = [(slice(offsets[n], offsets[n + 1]), rows.written[n]) for n in numbers]
        yield rows.read[sequence], [one for one in pieces if one[0].start < one[0].stop]


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pages: StatePages,
    rows: Rows,
    *,
    silu: bool,
    out: torch.Tensor,
    before: int | None = None,
    after: int | None = None,
) -> torch.Tensor:
    """Convolve as `conv_step` and `conv_pieces` do."""
    channels = out.shape[1]
    given, whole = x[:, :channels], _wider(x)
    if before is not None:
        given = given * whole[:, before : before + channels]
    for table, pieces in runs(rows, len(x)):
        state = read_state(pages, table, (weight.shape[1] - 1, channels)).unsqueeze(0)
        for at, written in pieces:
            found, state = causal_conv(given[at].unsqueeze(0), weight, bias, state)
            write_state(pages, written, state[0])
            found = functional.silu(found[0]) if silu else found[0]
            if after is not None:
                found = whole[at, after : after + channels].float() * found.to(out.dtype).float()
            out[at] = found.to(out.dtype)
    return out


def _wider(x: torch.Tensor) -> torch.Tensor:
    """Return the rows of which `x [T, C]` has the beginning, to their ends."""
    return x.as_strided((len(x), x.stride(0)), x.stride()) if x.stride(0) > x.shape[1] else x


def delta(
    conv: torch.Tensor,
    mixed: torch.Tensor,
    rule: DeltaRule,
    pages: StatePages,
    rows: Rows,
    *,
    out: torch.Tensor,
    scratch: object = None,
) -> torch.Tensor:
    """Advance as `delta_step` and `delta_chunks` do."""
    keys, values = rule.key_heads * rule.key_dim, rule.value_heads * rule.value_dim
    q, k, v = conv.split([keys, keys, values], dim=-1)
    share = rule.value_heads // rule.key_heads
    q, k = (
        unit_rows(part.unflatten(-1, (rule.key_heads, rule.key_dim))).repeat_interleave(share, dim=1)
        for part in (q, k)
    )
    q, v = q * rule.key_dim**-0.5, v.unflatten(-1, (rule.value_heads, rule.value_dim))
    gate, rate, step = mixed[:, 2 * keys + values :].split(
        [values, rule.value_heads, rule.value_heads], dim=-1
    )
    log_decay = -rule.speed * functional.softplus(step.float() + rule.step_bias)
    parts = q, k, v, log_decay, rule.largest_rate * rate.float().sigmoid()
    shape = rule.value_heads, rule.key_dim, rule.value_dim
    for table, pieces in runs(rows, len(conv)):
        state = read_state(pages, table, shape).unsqueeze(0)
        for at, written in pieces:
            found, state = delta_rule(*(part[at].unsqueeze(0) for part in parts), state)
            write_state(pages, written, state[0])
            normed = group_norm(found[0], rule.norm, rule.eps, 1).flatten(1)
            out[at] = (normed * functional.silu(gate[at].float())).to(out.dtype)
    return out


def space(
    conv: torch.Tensor,
    mixed: torch.Tensor,
    rule: SpaceRule,
    pages: StatePages,
    rows: Rows,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Advance as `space_step` and `space_chunks` do."""
    width, kept = rule.heads * rule.head_dim, rule.groups * rule.state
    gate, step = mixed[:, :width], mixed[:, -rule.heads :]
    x, b, c = conv.split([width, kept, kept], dim=-1)
    x = x.unflatten(-1, (rule.heads, rule.head_dim))
    b, c = (part.unflatten(-1, (rule.groups, rule.state)) for part in (b, c))
    steps = functional.softplus(step.float() + rule.step_bias).clamp(*rule.step_bounds)
    for table, pieces in runs(rows, len(conv)):
        state = read_state(pages, table, (rule.heads, rule.head_dim, rule.state)).unsqueeze(0)
        for at, written in pieces:
            one = [part[at].unsqueeze(0) for part in (x, steps, b, c)]
            found, state = state_space(one[0], one[1], rule.a, *one[2:], state)
            write_state(pages, written, state[0])
            answer = (found[0] + x[at] * rule.skip.unsqueeze(-1)).flatten(1)
            out[at] = _gated(answer, functional.silu(gate[at].float()), rule).to(out.dtype)
    return out


def _gated(answer: torch.Tensor, gate: torch.Tensor, rule: SpaceRule) -> torch.Tensor:
    if rule.norm is None:
        return answer * gate
    if rule.order == "after_gate":
        return group_norm(answer * gate, rule.norm, rule.eps, rule.groups)
    return group_norm(answer, rule.norm, rule.eps, rule.groups) * gate


def scan(
    x: torch.Tensor,
    steps: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    rule: ScanRule,
    pages: StatePages,
    rows: Rows,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Advance as `channel_scan` does."""
    delta = functional.softplus(steps.float() + rule.step_bias)
    for table, pieces in runs(rows, len(x)):
        state = read_state(pages, table, (rule.width, rule.state)).unsqueeze(0)
        for at, written in pieces:
            one = [part[at].unsqueeze(0) for part in (x, delta, b, c)]
            found, state = selective_scan(one[0], one[1], rule.a, *one[2:], state)
            write_state(pages, written, state[0])
            answer = (found[0] + x[at] * rule.skip) * functional.silu(gate[at].float())
            out[at] = answer.to(out.dtype)
    return out
