"""Mamba-2 for many tokens of several sequences, CHUNK rows at once (Dao and Gu 2024).

The meaning is diptych/engine/backends/torch/recurrent/state_space.py. A program goes from chunk to chunk with
the states of some channels of a head in registers. Rows of a chunk read each other as attention does, with
decays in place of a softmax; what was before them is in the states. Side by side run 48 to 128 heads, a few
programs each, all of which multiply what the head's rows have in common.

Chunks begin where cuts of the rows do, as in torch; a row's bits depend on where its cut begins. Sums are
float32; operands are as wide_product.py says. Outputs take the place of inputs in `conv`, whose norm and gate
follow in group_norm.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.delta_chunks import CHUNK, across
from kernels.gpu.launch import power_of_two
from kernels.gpu.space_step import bounded_step, gated_answers, space_sizes
from kernels.gpu.state_tiles import in_cuts, in_pages, load_tile, store_tile
from kernels.gpu.wide_product import operand_precision, product
from kernels.recurrence import SpaceRule
from kernels.state_pages import StateRuns

_LANES = 32
"""Channels of a program."""


@triton.jit(do_not_specialize=["offsets", "cuts", "ends", "read", "written", "starts", "page_blocks"])
def _space_chunks(
    conv, mixed, decay, step_bias, skip, offsets, cuts, ends, memory, base, read, written, starts, live,
    begin, stride, page_blocks, conv_stride, mixed_stride, step_at, low, high, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, P: tl.constexpr, P_PAD: tl.constexpr, M: tl.constexpr, M_PAD: tl.constexpr,
    CHUNK: tl.constexpr, LANES: tl.constexpr, BASED: tl.constexpr, BLOCK_UNITS: tl.constexpr,
    UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go through the chunks of one sequence, for LANES channels of one head; arguments as those of
    `_space_step`, with `offsets`, `cuts` and `ends` of StateRuns.
    """
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first = tl.load(cuts + sequence)
    last = tl.load(cuts + sequence + 1)
    start = tl.load(offsets + sequence)
    at = tl.arange(0, CHUNK)
    other = tl.arange(0, CHUNK)
    channels = tl.program_id(0) * LANES + tl.arange(0, LANES)
    in_head = channels < P
    if tl.load(live + sequence) == 0:
        for chunk in range(start, tl.load(offsets + sequence + 1), CHUNK):
            rows = (chunk + at).to(tl.int64)
            mask = (rows < tl.load(offsets + sequence + 1))[:, None] & in_head[None, :]
            place = conv + rows[:, None] * conv_stride + head * P + channels[None, :]
            tl.store(place, tl.zeros([CHUNK, LANES], tl.float32), mask=mask)
    else:
        if BASED:
            memory += tl.multiple_of(tl.load(base), UNIT)
        lanes = tl.arange(0, M_PAD)
        in_state = lanes < M
        units = tl.arange(0, M_PAD // UNIT)
        a = tl.load(decay + head)
        bias = tl.load(step_bias + head)
        kept = tl.load(skip + head)
        # Transposed as it is multiplied: [M, channels] of the state's [channels, M].
        state = tl.trans(load_tile(
            memory, read + sequence * page_blocks, tl.load(starts + sequence), begin, head * P + channels,
            in_head, units, units < M // UNIT, M // UNIT, stride, BLOCK_UNITS, UNIT, LANES, M_PAD,
        ))  # fmt: skip
        for cut in range(first, last):
            end = tl.load(ends + cut)
            for chunk in range(start, end, CHUNK):
                rows = (chunk + at).to(tl.int64)
                mask = rows < end
                raw = tl.load(mixed + rows * mixed_stride + step_at + head, mask=mask, other=0.0)
                step = tl.where(mask, bounded_step(raw.to(tl.float32), bias, low, high), 0.0)
                total = tl.cumsum(step * a, axis=0)
                whole = tl.sum(step * a, axis=0)
                of_row = conv + rows[:, None] * conv_stride
                place = of_row + head * P + channels[None, :]
                x_mask = mask[:, None] & in_head[None, :]
                x = tl.load(place, mask=x_mask, other=0.0)
                shared = of_row + HEADS * P + (head // (HEADS // GROUPS)) * M + lanes[None, :]
                shared_mask = mask[:, None] & in_state[None, :]
                b = tl.load(shared, mask=shared_mask, other=0.0)
                c = tl.load(shared + GROUPS * M, mask=shared_mask, other=0.0)
                added = x * step[:, None]

                answer = product(c, state, PRECISION) * tl.exp(total)[:, None]
                seen = at[:, None] >= other[None, :]
                between = tl.exp(tl.where(seen, total[:, None] - across(total, CHUNK), 0.0))
                met = product(c, tl.trans(b), PRECISION)
                met = tl.where(seen, met * between, 0.0)
                answer += product(met, added, PRECISION)
                tl.store(place, answer + x * kept, mask=x_mask)
                faded = b * tl.exp(whole - total)[:, None]
                state = state * tl.exp(whole) + product(tl.trans(faded), added, PRECISION)
            start = end
            store_tile(
                tl.trans(state), memory, written + cut * page_blocks, begin, head * P + channels, in_head,
                units, units < M // UNIT, M // UNIT, stride, BLOCK_UNITS, UNIT, LANES, M_PAD,
            )  # fmt: skip


def space_chunks(
    conv: torch.Tensor,
    mixed: torch.Tensor,
    rule: SpaceRule,
    runs: StateRuns,
    first: int,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Advance the sequences of `runs` by their rows and return the gated outputs in `out [T, heads * P]`.

    Arguments as those of `space_step`. States are written behind each cut. Rows of no sequence are no
    numbers.
    """
    low, high = rule.step_bounds
    lanes = min(_LANES, power_of_two(rule.head_dim, 16))
    _space_chunks[(triton.cdiv(rule.head_dim, lanes), rule.heads, runs.sequences)](
        conv, mixed, rule.a, rule.step_bias, rule.skip, **in_cuts(runs), conv_stride=conv.stride(0),
        mixed_stride=mixed.stride(0), step_at=rule.step_column, low=low, high=high, CHUNK=CHUNK, LANES=lanes,
        PRECISION=operand_precision(mixed.dtype), **space_sizes(rule),
        **in_pages(runs, first, rule.state), num_warps=4 if rule.state <= 128 else 8, num_stages=1,
    )  # fmt: skip
    return gated_answers(conv, mixed, rule, out)
