"""The operators of recurrent layers as their torch meanings, over states in pages, for tests."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from diptych.engine.backends.torch.recurrent.delta_rule import delta_rule
from diptych.engine.backends.torch.recurrent.norms import group_norm, unit_rows
from diptych.engine.backends.torch.recurrent.selective_scan import selective_scan
from diptych.engine.backends.torch.recurrent.state_space import state_space
from kernels.recurrence import DeltaRule, ScanRule, SpaceRule
from kernels.state_pages import StatePool, StateRuns

Advance = Iterator[tuple[slice, torch.Tensor, list[torch.Tensor]]]


def cuts(runs: StateRuns, first: int, shape: tuple[int, ...], out: torch.Tensor) -> Advance:
    """Yield the rows of each cut with the state `[1, *shape]` before it, and a list for that behind it, which
    is kept; rows of sequences that are not computed become zeros.
    """
    pool = StatePool(runs)
    size = int(torch.Size(shape).numel())
    for sequence in range(runs.sequences):
        state = pool.before(sequence, first, size).view(1, *shape) if runs.live[sequence] else None
        if state is None:
            at = slice(sequence, sequence + 1)
            if runs.offsets is not None:
                at = slice(*runs.offsets[sequence : sequence + 2].tolist())
            out[at] = 0
            continue
        for stretch in pool.stretches(sequence):
            if stretch.rows.start < stretch.rows.stop:
                behind: list[torch.Tensor] = []
                yield stretch.rows, state, behind
                state = behind[0]
            pool.keep(stretch.page, first, state)


def delta(
    conv: torch.Tensor,
    mixed: torch.Tensor,
    rule: DeltaRule,
    runs: StateRuns,
    first: int,
    *,
    out: torch.Tensor,
    rooms: object = None,
) -> torch.Tensor:
    """Advance as kernels/gpu/delta_rule.py does."""
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
    for at, state, behind in cuts(runs, first, (rule.value_heads, rule.key_dim, rule.value_dim), out):
        found, after = delta_rule(*(part[at].unsqueeze(0) for part in parts), state)
        behind.append(after)
        normed = group_norm(found[0], rule.norm, rule.eps, 1).flatten(1)
        out[at] = (normed * functional.silu(gate[at].float())).to(out.dtype)
    return out


def space(
    conv: torch.Tensor,
    mixed: torch.Tensor,
    rule: SpaceRule,
    runs: StateRuns,
    first: int,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Advance as kernels/gpu/state_space.py does."""
    width, kept = rule.heads * rule.head_dim, rule.groups * rule.state
    gate, step = mixed[:, :width], mixed[:, -rule.heads :]
    x, b, c = conv.split([width, kept, kept], dim=-1)
    x = x.unflatten(-1, (rule.heads, rule.head_dim))
    b, c = (part.unflatten(-1, (rule.groups, rule.state)) for part in (b, c))
    steps = functional.softplus(step.float() + rule.step_bias).clamp(*rule.step_bounds)
    for at, state, behind in cuts(runs, first, (rule.heads, rule.head_dim, rule.state), out):
        one = [part[at].unsqueeze(0) for part in (x, steps, b, c)]
        found, after = state_space(one[0], one[1], rule.a, *one[2:], state)
        behind.append(after)
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
    runs: StateRuns,
    first: int,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Advance as kernels/gpu/selective_scan.py does."""
    delta = functional.softplus(steps.float() + rule.step_bias)
    for at, state, behind in cuts(runs, first, (rule.width, rule.state), out):
        one = [part[at].unsqueeze(0) for part in (x, delta, b, c)]
        found, after = selective_scan(one[0], one[1], rule.a, *one[2:], state)
        behind.append(after)
        answer = (found[0] + x[at] * rule.skip) * functional.silu(gate[at].float())
        out[at] = answer.to(out.dtype)
    return out
