"""Mamba-2 for many tokens of several sequences, CHUNK rows at once (Dao and Gu 2024).

The meaning is diptych/engine/backends/torch/recurrent/state_space.py. A program goes from chunk to chunk with
a head's matrix in registers. Rows of a chunk read each other as attention does, with decays in place of a
softmax; what was before them is in the matrix. Heads are what runs side by side: 48 to 128 of them.

Chunks begin where pieces do, as in torch; a row's bits depend on where its piece begins. Sums are float32;
operands are as `operand_precision` (delta_chunks.py) says. Outputs take the place of inputs in `conv`, whose
norm and gate follow in group_norm.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.delta_chunks import CHUNK, operand_precision
from kernels.gpu.space_step import bounded_step, gated_answers, space_sizes, step_column
from kernels.gpu.state_pages import in_units, load_tile, store_tile, table_width
from kernels.recurrence import PieceRows, SpaceRule, StatePages


@triton.jit(do_not_specialize=["table_width"])
def _space_chunks(
    conv, mixed, decay, step_bias, skip, firsts, offsets, memory, read, written, begin, stride, table_width,
    conv_stride, mixed_stride, step_at, low, high, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    P: tl.constexpr, P_PAD: tl.constexpr, M: tl.constexpr, M_PAD: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_UNITS: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go through the chunks of one sequence, for one head; arguments as those of `_space_step`, with `firsts`
    and `offsets` of PieceRows.
    """
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    first = tl.load(firsts + sequence)
    last = tl.load(firsts + sequence + 1)
    if first < last:
        at = tl.arange(0, CHUNK)
        other = tl.arange(0, CHUNK)
        channels = tl.arange(0, P_PAD)
        lanes = tl.arange(0, M_PAD)
        in_head = channels < P
        in_state = lanes < M
        units = tl.arange(0, M_PAD // UNIT)
        a = tl.load(decay + head)
        bias = tl.load(step_bias + head)
        kept = tl.load(skip + head)
        # Transposed as it is multiplied: [M, P] of the state's [P, M].
        state = tl.trans(load_tile(
            memory, read + sequence * table_width, begin, head * P + channels, in_head, units,
            units < M // UNIT, M // UNIT, stride, BLOCK_UNITS, UNIT, P_PAD, M_PAD,
        ))  # fmt: skip
        for piece in range(first, last):
            start = tl.load(offsets + piece)
            end = tl.load(offsets + piece + 1)
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

                answer = tl.dot(c, state, input_precision=PRECISION) * tl.exp(total)[:, None]
                across = tl.sum(tl.where(at[:, None] == other[None, :], total[:, None], 0.0), axis=0)
                seen = at[:, None] >= other[None, :]
                between = tl.exp(tl.where(seen, total[:, None] - across[None, :], 0.0))
                met = tl.dot(c, tl.trans(b), input_precision=PRECISION)
                met = tl.where(seen, met * between, 0.0)
                answer += tl.dot(met, added, input_precision=PRECISION)
                tl.store(place, answer + x * kept, mask=x_mask)
                faded = b * tl.exp(whole - total)[:, None]
                state = state * tl.exp(whole) + tl.dot(tl.trans(faded), added, input_precision=PRECISION)
            if end > start:
                store_tile(
                    tl.trans(state), memory, written + piece * table_width, begin, head * P + channels,
                    in_head, units, units < M // UNIT, M // UNIT, stride, BLOCK_UNITS, UNIT, P_PAD, M_PAD,
                )  # fmt: skip


def space_chunks(
    conv: torch.Tensor,
    mixed: torch.Tensor,
    rule: SpaceRule,
    pages: StatePages,
    rows: PieceRows,
    *,
    out: torch.Tensor,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Advance several sequences by their tokens and return the gated outputs in `out [T, heads * P]`.

    Arguments as those of `space_step`. States are written behind each piece. Rows that belong to no piece are
    no numbers.
    """
    sequences = len(rows.read)
    if sequences == 0 or rows.max_rows == 0:
        return out
    units = in_units(pages, rule.state)
    _space_chunks[(rule.heads, sequences)](
        conv, mixed, rule.a, rule.step_bias, rule.skip, rows.firsts, rows.offsets, pages.memory, rows.read,
        rows.written, units.pop("begin"), units.pop("stride"), table_width(rows.read, rows.written),
        conv.stride(0), mixed.stride(0), step_column(rule), *rule.step_bounds, **space_sizes(rule), **units,
        CHUNK=chunk, PRECISION=operand_precision(mixed.dtype), num_warps=8,
    )  # fmt: skip
    return gated_answers(conv, mixed, rule, out)
