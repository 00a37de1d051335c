"""The gated delta rule for many tokens of several sequences, CHUNK rows at once.

The meaning is diptych/engine/backends/torch/recurrent/delta_rule.py. Two launches:

- **Each chunk by itself**, all chunks and heads at once: how its rows read one another. The correction of a
  row needs those of the rows before it, a triangular system whose inverse T is found row after row in
  registers (the WY form of Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule"). T times
  values and T times keys go to scratch, and so do the products of queries and keys.
- **Chunk after chunk**, a program a head and some of its values' lanes, with that part of the matrix in
  registers: the system's right side is known once the state before the chunk is.

Chunks begin where pieces do, as in torch. A row's bits depend on where its piece begins, and on no other
sequence. Sums are float32; operands are as `operand_precision` says. Outputs take the place of values in
`conv`, whose norm and gate follow in group_norm.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.delta_step import delta_columns, delta_sizes
from kernels.gpu.group_norm import group_norm
from kernels.gpu.launch import power_of_two
from kernels.gpu.state_pages import in_units, load_tile, softplus, store_tile, table_width
from kernels.recurrence import DeltaRule, PieceRows, StatePages

CHUNK = 64
"""Rows of a chunk."""
_LANES = 32
"""Lanes of values of a program that goes from chunk to chunk."""


def operand_precision(dtype: torch.dtype) -> str:
    """Return how float32 operands are multiplied in a model of `dtype`: as they are in one of float32, else
    as the sum of two TF32 each, three products in place of one, on the card's matrix units.

    The third product's error is that of 21 bits (tests/kernels/gpu/test_delta_chunks.py measures it).
    """
    return "ieee" if dtype == torch.float32 else "tf32x3"


@dataclass(frozen=True)
class DeltaScratch:
    """What the first launch leaves to the second, for chunks of up to so many rows and pieces."""

    values: torch.Tensor
    """float32 `[slots, value heads, CHUNK, V]`."""
    keys: torch.Tensor
    """float32 `[slots, value heads, CHUNK, D]`."""
    within: torch.Tensor
    """float32 `[slots, value heads, CHUNK, CHUNK]`."""

    @classmethod
    def make(
        cls, rows: int, pieces: int, rule: DeltaRule, device: torch.device, chunk: int = CHUNK
    ) -> DeltaScratch:
        """Allocate scratch for steps of up to so many rows and pieces."""
        slots = chunk_slots(rows, pieces, chunk)

        def empty(width: int) -> torch.Tensor:
            return torch.empty((slots, rule.value_heads, chunk, width), device=device)

        return cls(empty(rule.value_dim), empty(rule.key_dim), empty(chunk))


def chunk_slots(rows: int, pieces: int, chunk: int = CHUNK) -> int:
    """Return the most chunks that so many rows make in so many pieces."""
    return min(rows, rows // chunk + pieces)


@triton.jit
def chunks_before(offsets, piece, PIECES: tl.constexpr, PIECES_PAD: tl.constexpr, CHUNK: tl.constexpr):
    """Return the chunks of all pieces before number `piece`."""
    numbers = tl.arange(0, PIECES_PAD)
    before = numbers < tl.minimum(piece, PIECES)
    starts = tl.load(offsets + numbers, mask=before, other=0)
    ends = tl.load(offsets + numbers + 1, mask=before, other=0)
    return tl.sum((ends - starts + CHUNK - 1) // CHUNK, axis=0)


@triton.jit
def decays(mixed, step_at, row_at, mask, speed, bias):
    """Return the logarithms of the decays up to each row of a chunk, float32 `[CHUNK]`; rows outside of
    `mask` do not decay.
    """
    step = tl.load(mixed + row_at + step_at, mask=mask, other=0.0).to(tl.float32)
    return tl.cumsum(tl.where(mask, -speed * softplus(step + bias), 0.0), axis=0)


@triton.jit
def unit_rows(x, scale):
    """Return float32 `x [rows, D]`, each row divided by its length, times `scale`."""
    return x * (tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6) * scale)[:, None]


@triton.jit
def _prepare(
    conv, mixed, speed, step_bias, offsets, values, keys, within, conv_stride, mixed_stride, rate_at,
    step_at, largest_rate, query_scale, PIECES: tl.constexpr, PIECES_PAD: tl.constexpr, CHUNK: tl.constexpr,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Solve one chunk of one value head; arguments as those of `_delta_step`, scratch as DeltaScratch."""
    slot = tl.program_id(1)
    head = tl.program_id(0)
    numbers = tl.arange(0, PIECES_PAD)
    starts = tl.load(offsets + numbers, mask=numbers < PIECES, other=0)
    lengths = tl.load(offsets + numbers + 1, mask=numbers < PIECES, other=0) - starts
    ends = tl.cumsum((tl.where(numbers < PIECES, lengths, 0) + CHUNK - 1) // CHUNK, axis=0)
    piece = tl.sum((ends <= slot).to(tl.int32), axis=0)
    if piece < PIECES:
        begin = tl.load(offsets + piece)
        begin += (slot - chunks_before(offsets, piece, PIECES, PIECES_PAD, CHUNK)) * CHUNK
        at = tl.arange(0, CHUNK)
        other = tl.arange(0, CHUNK)
        rows = (begin + at).to(tl.int64)
        mask = rows < tl.load(offsets + piece + 1)
        dims = tl.arange(0, D_PAD)
        key = conv + rows[:, None] * conv_stride + (head // SHARE) * D + dims[None, :]
        key_mask = mask[:, None] & (dims < D)[None, :]
        k = unit_rows(tl.load(key + KEY_HEADS * D, mask=key_mask, other=0.0), 1.0)
        total = decays(mixed, step_at + head, rows * mixed_stride, mask, tl.load(speed + head), tl.load(step_bias + head))
        raw = tl.load(mixed + rows * mixed_stride + rate_at + head, mask=mask, other=0.0).to(tl.float32)
        rate = tl.where(mask, largest_rate / (1.0 + tl.exp(-raw)), 0.0)
        earlier = at[:, None] > other[None, :]
        apart = total[:, None] - tl.sum(tl.where(at[:, None] == other[None, :], total[:, None], 0.0), axis=0)[None, :]
        k_T = tl.trans(k)
        system = tl.dot(k * rate[:, None], k_T, input_precision=PRECISION)
        system = tl.where(earlier, -system * tl.exp(tl.where(earlier, apart, 0.0)), 0.0)
        # Row i of the inverse is that of the system with the rows before it put in.
        inverse = system
        for i in range(1, CHUNK):
            row = tl.sum(tl.where(at[:, None] == i, system, 0.0), axis=0)
            column = tl.sum(tl.where(at[:, None] == other[None, :], row[None, :], 0.0), axis=1)
            solved = row + tl.sum(column[:, None] * inverse, axis=0)
            inverse = tl.where(at[:, None] == i, solved[None, :], inverse)
        inverse += (at[:, None] == other[None, :]).to(tl.float32)

        place = (slot * HEADS + head).to(tl.int64) * CHUNK
        read = tl.dot(inverse, k * (rate * tl.exp(total))[:, None], input_precision=PRECISION)
        tl.store(keys + (place + at)[:, None] * D + dims[None, :], read, mask=(dims < D)[None, :])
        q = unit_rows(tl.load(key, mask=key_mask, other=0.0), query_scale)
        met = tl.dot(q, k_T, input_precision=PRECISION)
        seen = at[:, None] >= other[None, :]
        met = tl.where(seen, met * tl.exp(tl.where(seen, apart, 0.0)), 0.0)
        tl.store(within + (place + at)[:, None] * CHUNK + other[None, :], met)
        lanes = tl.arange(0, V_PAD)
        value = conv + rows[:, None] * conv_stride + 2 * KEY_HEADS * D + head * V + lanes[None, :]
        v = tl.load(value, mask=mask[:, None] & (lanes < V)[None, :], other=0.0)
        corrected = tl.dot(inverse, v * rate[:, None], input_precision=PRECISION)
        tl.store(values + (place + at)[:, None] * V + lanes[None, :], corrected, mask=(lanes < V)[None, :])


@triton.jit(do_not_specialize=["table_width"])
def _advance(
    conv, mixed, speed, step_bias, firsts, offsets, values, keys, within, memory, read, written, begin,
    stride, table_width, conv_stride, mixed_stride, step_at, query_scale, PIECES: tl.constexpr,
    PIECES_PAD: tl.constexpr, CHUNK: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
    SHARE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    LANES: tl.constexpr, BLOCK_UNITS: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go through the chunks of one sequence, for one head and LANES of its values."""
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first = tl.load(firsts + sequence)
    last = tl.load(firsts + sequence + 1)
    if first < last:
        at = tl.arange(0, CHUNK)
        other = tl.arange(0, CHUNK)
        dims = tl.arange(0, D_PAD)
        in_key = dims < D
        lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
        in_value = lanes < V
        units = tl.program_id(0) * (LANES // UNIT) + tl.arange(0, LANES // UNIT)
        of_head_speed = tl.load(speed + head)
        of_head_bias = tl.load(step_bias + head)
        state = load_tile(
            memory, read + sequence * table_width, begin, head * D + dims, in_key, units,
            units < V // UNIT, V // UNIT, stride, BLOCK_UNITS, UNIT, D_PAD, LANES,
        )  # fmt: skip
        slot = chunks_before(offsets, first, PIECES, PIECES_PAD, CHUNK)
        for piece in range(first, last):
            start = tl.load(offsets + piece)
            end = tl.load(offsets + piece + 1)
            for chunk in range(start, end, CHUNK):
                rows = (chunk + at).to(tl.int64)
                mask = rows < end
                place = (slot * HEADS + head).to(tl.int64) * CHUNK
                slot += 1
                total = decays(mixed, step_at + head, rows * mixed_stride, mask, of_head_speed, of_head_bias)
                whole = tl.sum(tl.where(at == CHUNK - 1, total, 0.0), axis=0)
                key = conv + rows[:, None] * conv_stride + (head // SHARE) * D + dims[None, :]
                key_mask = mask[:, None] & in_key[None, :]
                solved = tl.load(keys + (place + at)[:, None] * D + dims[None, :], mask=in_key[None, :], other=0.0)
                right = tl.load(values + (place + at)[:, None] * V + lanes[None, :], mask=in_value[None, :], other=0.0)
                corrected = right - tl.dot(solved, state, input_precision=PRECISION)
                q = unit_rows(tl.load(key, mask=key_mask, other=0.0), query_scale)
                answer = tl.dot(q * tl.exp(total)[:, None], state, input_precision=PRECISION)
                met = tl.load(within + (place + at)[:, None] * CHUNK + other[None, :])
                answer += tl.dot(met, corrected, input_precision=PRECISION)
                value = conv + rows[:, None] * conv_stride + 2 * KEY_HEADS * D + head * V + lanes[None, :]
                tl.store(value, answer, mask=mask[:, None] & in_value[None, :])
                k = unit_rows(tl.load(key + KEY_HEADS * D, mask=key_mask, other=0.0), 1.0)
                faded = k * tl.where(mask, tl.exp(whole - total), 0.0)[:, None]
                state = state * tl.exp(whole) + tl.dot(tl.trans(faded), corrected, input_precision=PRECISION)
            if end > start:
                store_tile(
                    state, memory, written + piece * table_width, begin, head * D + dims, in_key, units,
                    units < V // UNIT, V // UNIT, stride, BLOCK_UNITS, UNIT, D_PAD, LANES,
                )  # fmt: skip


def delta_chunks(
    conv: torch.Tensor,
    mixed: torch.Tensor,
    rule: DeltaRule,
    pages: StatePages,
    rows: PieceRows,
    *,
    scratch: DeltaScratch,
    out: torch.Tensor,
) -> torch.Tensor:
    """Advance several sequences by their tokens and return the gated outputs in `out [T, value heads * V]`.

    Arguments as those of `delta_step`; the values in `conv [T, channels]` are overwritten. States are written
    behind each piece. Rows that belong to no piece are no numbers.
    """
    sequences, pieces = len(rows.read), len(rows.written)
    if sequences == 0 or pieces == 0 or rows.max_rows == 0:
        return out
    chunk = scratch.within.shape[2]
    slots = chunk_slots(len(conv), pieces, chunk)
    if len(scratch.within) < slots:
        raise ValueError(f"scratch for {len(scratch.within)} chunks, {slots} are to be computed")
    gate_at, rate_at, step_at = delta_columns(rule)
    given = {
        **delta_sizes(rule),
        "HEADS": rule.value_heads,
        "CHUNK": chunk,
        "PIECES": pieces,
        "PIECES_PAD": power_of_two(pieces),
        "PRECISION": operand_precision(mixed.dtype),
    }
    room = (scratch.values, scratch.keys, scratch.within)
    strides = conv.stride(0), mixed.stride(0)
    _prepare[(rule.value_heads, slots)](
        conv, mixed, rule.speed, rule.step_bias, rows.offsets, *room, *strides, rate_at, step_at,
        rule.largest_rate, rule.key_dim**-0.5, **given, num_warps=8,
    )  # fmt: skip
    units = in_units(pages, rule.value_dim)
    lanes = min(_LANES, power_of_two(rule.value_dim, 16))
    _advance[(triton.cdiv(rule.value_dim, lanes), rule.value_heads, sequences)](
        conv, mixed, rule.speed, rule.step_bias, rows.firsts, rows.offsets, *room, pages.memory, rows.read,
        rows.written, units.pop("begin"), units.pop("stride"), table_width(rows.read, rows.written),
        *strides, step_at, rule.key_dim**-0.5, **given, LANES=lanes, **units, num_warps=4,
    )  # fmt: skip
    width = rule.value_heads * rule.value_dim
    answers, gate = conv[:, -width:], mixed[:, gate_at : gate_at + width]
    return group_norm(
        answers, gate, rule.norm, rule.eps, groups=rule.value_heads, order="before_gate", out=out
    )
