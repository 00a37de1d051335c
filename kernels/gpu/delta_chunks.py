"""The gated delta rule for many tokens of several sequences, CHUNK rows at once.

The meaning is diptych/engine/backends/torch/recurrent/delta_rule.py. Two launches:

- **Each chunk by itself**, all chunks and heads at once: how its rows read one another. The correction of a
  row needs those of the rows before it, a triangular system whose inverse T is found row after row in
  registers (the WY form of Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over
  Sequence Length"). T times values takes the place of values in `conv`; T times keys, and the products of
  queries and keys, go to rooms of their own.
- **Chunk after chunk**, a program a head and some lanes of its values, with that part of the matrix in
  registers: the system's right side is known once the state before the chunk is.

Chunks begin where cuts of the rows do, as in torch. A row's bits depend on where its cut begins, and on no
other sequence. Sums are float32; operands are as wide_product.py says. Outputs take the place of values,
too; their norm and gate follow in group_norm.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.delta_step import delta_sizes
from kernels.gpu.group_norm import group_norm
from kernels.gpu.launch import power_of_two
from kernels.gpu.state_tiles import in_cuts, in_pages, load_tile, softplus, store_tile
from kernels.gpu.wide_product import operand_precision, product
from kernels.recurrence import DELTA_CHUNK, DeltaRule
from kernels.state_pages import StateRuns

CHUNK = DELTA_CHUNK
"""Rows of a chunk."""
_LANES = 32
"""Lanes of values of a program that goes from chunk to chunk."""
_LEAST_CUTS = 32
"""Cuts that a kernel is compiled for at least: most steps have fewer, and none of these compiles its own."""


@triton.jit
def chunks_before(ends, cut, CUTS_PAD: tl.constexpr, CHUNK: tl.constexpr):
    """Return the chunks of all cuts before number `cut`, whose rows end at `ends`."""
    numbers = tl.arange(0, CUTS_PAD)
    begins = tl.load(ends + numbers - 1, mask=(numbers < cut) & (numbers > 0), other=0)
    found = tl.load(ends + numbers, mask=numbers < cut, other=0)
    return tl.sum(tl.where(numbers < cut, (found - begins + CHUNK - 1) // CHUNK, 0), axis=0)


@triton.jit
def decays(steps_at, mask, speed, bias):
    """Return the logarithms of the decays up to each row of a chunk, float32 `[CHUNK]`, of the steps at
    `steps_at`; rows outside of `mask` do not decay.
    """
    step = tl.load(steps_at, mask=mask, other=0.0).to(tl.float32)
    return tl.cumsum(tl.where(mask, -speed * softplus(step + bias), 0.0), axis=0)


@triton.jit
def unit_rows(x, scale):
    """Return float32 `x [rows, D]`, each row divided by its length, times `scale`."""
    return x * (tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6) * scale)[:, None]


@triton.jit
def across(column, CHUNK: tl.constexpr):
    """Return `column [CHUNK]` along the other axis of a square: the same numbers as a row."""
    at = tl.arange(0, CHUNK)
    same = at[:, None] == tl.arange(0, CHUNK)[None, :]
    return tl.sum(tl.where(same, column[:, None], 0.0), axis=0)[None, :]


@triton.jit
def inverse_of(system, CHUNK: tl.constexpr):
    """Return the inverse of `1 - system`, a strictly lower triangle float32 `[CHUNK, CHUNK]`.

    Row i is that of the system with the rows before it put in: no power of the system is taken, which may be
    large where the inverse is not.
    """
    at = tl.arange(0, CHUNK)
    same = at[:, None] == tl.arange(0, CHUNK)[None, :]
    inverse = system
    for i in range(1, CHUNK):
        row = tl.sum(tl.where(at[:, None] == i, system, 0.0), axis=0)
        column = tl.sum(tl.where(same, row[None, :], 0.0), axis=1)
        solved = row + tl.sum(column[:, None] * inverse, axis=0)
        inverse = tl.where(at[:, None] == i, solved[None, :], inverse)
    return inverse + same.to(tl.float32)


@triton.jit(do_not_specialize=["cuts", "ends", "sequences"])
def _prepare(
    conv, mixed, speed, step_bias, cuts, ends, keys, within, conv_stride, mixed_stride, keys_stride,
    within_stride, rate_at, step_at, largest_rate, query_scale, sequences, CUTS_PAD: tl.constexpr,
    CHUNK: tl.constexpr, KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Solve one chunk of one value head.

    Arguments as those of `_delta_step`, `cuts [sequences + 1]` and `ends` as StateRuns has them. `keys` is
    float32 `[T, value heads * D]`, `within [T, value heads * CHUNK]`.
    """
    head = tl.program_id(0)
    slot = tl.program_id(1)
    numbers = tl.arange(0, CUTS_PAD)
    used = tl.load(cuts + sequences)
    begins = tl.load(ends + numbers - 1, mask=(numbers < used) & (numbers > 0), other=0)
    lengths = tl.load(ends + numbers, mask=numbers < used, other=0) - begins
    chunks = tl.cumsum(tl.where(numbers < used, (lengths + CHUNK - 1) // CHUNK, 0), axis=0)
    cut = tl.sum((chunks <= slot).to(tl.int32), axis=0)
    if cut < used:
        begin = tl.sum(tl.where(numbers == cut, begins, 0), axis=0)
        begin += (slot - chunks_before(ends, cut, CUTS_PAD, CHUNK)) * CHUNK
        at = tl.arange(0, CHUNK)
        other = tl.arange(0, CHUNK)
        rows = (begin + at).to(tl.int64)
        mask = rows < tl.load(ends + cut)
        dims = tl.arange(0, D_PAD)
        lanes = tl.arange(0, V_PAD)
        key = conv + rows[:, None] * conv_stride + (head // SHARE) * D + dims[None, :]
        key_mask = mask[:, None] & (dims < D)[None, :]
        k = unit_rows(tl.load(key + KEY_HEADS * D, mask=key_mask, other=0.0), 1.0)
        given = mixed + rows * mixed_stride + head
        total = decays(given + step_at, mask, tl.load(speed + head), tl.load(step_bias + head))
        raw = tl.load(given + rate_at, mask=mask, other=0.0).to(tl.float32)
        rate = tl.where(mask, largest_rate / (1.0 + tl.exp(-raw)), 0.0)
        apart = total[:, None] - across(total, CHUNK)
        earlier = at[:, None] > other[None, :]
        k_T = tl.trans(k)
        system = product(k * rate[:, None], k_T, PRECISION)
        system = tl.where(earlier, -system * tl.exp(tl.where(earlier, apart, 0.0)), 0.0)
        inverse = inverse_of(system, CHUNK)

        read = product(inverse, k * (rate * tl.exp(total))[:, None], PRECISION)
        tl.store(keys + rows[:, None] * keys_stride + head * D + dims[None, :], read, mask=key_mask)
        q = unit_rows(tl.load(key, mask=key_mask, other=0.0), query_scale)
        seen = at[:, None] >= other[None, :]
        met = product(q, k_T, PRECISION) * tl.exp(tl.where(seen, apart, 0.0))
        place = within + rows[:, None] * within_stride + head * CHUNK + other[None, :]
        tl.store(place, tl.where(seen, met, 0.0), mask=mask[:, None])
        value = conv + rows[:, None] * conv_stride + 2 * KEY_HEADS * D + head * V + lanes[None, :]
        value_mask = mask[:, None] & (lanes < V)[None, :]
        v = tl.load(value, mask=value_mask, other=0.0)
        tl.store(value, product(inverse, v * rate[:, None], PRECISION), mask=value_mask)


@triton.jit(do_not_specialize=["offsets", "cuts", "ends", "read", "written", "starts", "page_blocks"])
def _advance(
    conv, mixed, speed, step_bias, keys, within, offsets, cuts, ends, memory, base, read, written, starts,
    live, begin, stride, page_blocks, conv_stride, mixed_stride, keys_stride, within_stride, step_at,
    query_scale, CHUNK: tl.constexpr, KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, LANES: tl.constexpr, BASED: tl.constexpr,
    BLOCK_UNITS: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go through the chunks of one sequence, for one head and LANES of its values; arguments as those of
    `_prepare` and `_delta_step`.
    """
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first = tl.load(cuts + sequence)
    last = tl.load(cuts + sequence + 1)
    start = tl.load(offsets + sequence)
    at = tl.arange(0, CHUNK)
    other = tl.arange(0, CHUNK)
    dims = tl.arange(0, D_PAD)
    in_key = dims < D
    lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
    in_value = lanes < V
    values = conv + 2 * KEY_HEADS * D + head * V + lanes
    if tl.load(live + sequence) == 0:
        for chunk in range(start, tl.load(offsets + sequence + 1), CHUNK):
            rows = (chunk + at).to(tl.int64)
            mask = (rows < tl.load(offsets + sequence + 1))[:, None] & in_value[None, :]
            place = values[None, :] + rows[:, None] * conv_stride
            tl.store(place, tl.zeros([CHUNK, LANES], tl.float32), mask=mask)
    else:
        if BASED:
            memory += tl.multiple_of(tl.load(base), UNIT)
        units = tl.program_id(0) * (LANES // UNIT) + tl.arange(0, LANES // UNIT)
        of_speed = tl.load(speed + head)
        of_bias = tl.load(step_bias + head)
        state = load_tile(
            memory, read + sequence * page_blocks, tl.load(starts + sequence), begin, head * D + dims, in_key,
            units, units < V // UNIT, V // UNIT, stride, BLOCK_UNITS, UNIT, D_PAD, LANES,
        )  # fmt: skip
        for cut in range(first, last):
            end = tl.load(ends + cut)
            for chunk in range(start, end, CHUNK):
                rows = (chunk + at).to(tl.int64)
                mask = rows < end
                total = decays(mixed + rows * mixed_stride + head + step_at, mask, of_speed, of_bias)
                whole = tl.sum(tl.where(at == CHUNK - 1, total, 0.0), axis=0)
                key = conv + rows[:, None] * conv_stride + (head // SHARE) * D + dims[None, :]
                key_mask = mask[:, None] & in_key[None, :]
                solved = tl.load(
                    keys + rows[:, None] * keys_stride + head * D + dims[None, :], mask=key_mask, other=0.0
                )
                place = values[None, :] + rows[:, None] * conv_stride
                value_mask = mask[:, None] & in_value[None, :]
                corrected = tl.load(place, mask=value_mask, other=0.0)
                corrected -= product(solved, state, PRECISION)
                q = unit_rows(tl.load(key, mask=key_mask, other=0.0), query_scale)
                answer = product(q * tl.exp(total)[:, None], state, PRECISION)
                met = tl.load(
                    within + rows[:, None] * within_stride + head * CHUNK + other[None, :],
                    mask=mask[:, None], other=0.0,
                )  # fmt: skip
                answer += product(met, corrected, PRECISION)
                tl.store(place, answer, mask=value_mask)
                k = unit_rows(tl.load(key + KEY_HEADS * D, mask=key_mask, other=0.0), 1.0)
                faded = tl.trans(k * tl.exp(whole - total)[:, None])
                state = state * tl.exp(whole) + product(faded, corrected, PRECISION)
            start = end
            store_tile(
                state, memory, written + cut * page_blocks, begin, head * D + dims, in_key, units,
                units < V // UNIT, V // UNIT, stride, BLOCK_UNITS, UNIT, D_PAD, LANES,
            )  # fmt: skip


def delta_chunks(
    conv: torch.Tensor,
    mixed: torch.Tensor,
    rule: DeltaRule,
    runs: StateRuns,
    first: int,
    *,
    rooms: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
) -> torch.Tensor:
    """Advance the sequences of `runs` by their rows and return the gated outputs in `out [T, value heads *
    V]`.

    Arguments as those of `delta_step`; the values in `conv [T, channels]` are overwritten. `rooms` are
    float32 `[T, value heads * D]` and `[T, value heads * CHUNK]`. States are written behind each cut. Rows of
    no sequence are no numbers.
    """
    assert runs.ends is not None, "the run is of chunks"
    keys, within = rooms
    gate_at, rate_at, step_at = rule.columns
    rows_of = in_cuts(runs)
    given = {
        **delta_sizes(rule),
        "conv_stride": conv.stride(0),
        "mixed_stride": mixed.stride(0),
        "keys_stride": keys.stride(0),
        "within_stride": within.stride(0),
        "step_at": step_at,
        "CHUNK": CHUNK,
        "PRECISION": operand_precision(mixed.dtype),
    }
    most_chunks = min(len(conv), len(conv) // CHUNK + len(runs.ends))
    _prepare[(rule.value_heads, most_chunks)](
        conv, mixed, rule.speed, rule.step_bias, rows_of["cuts"], rows_of["ends"], keys, within,
        rate_at=rate_at, largest_rate=rule.largest_rate, sequences=runs.sequences,
        CUTS_PAD=power_of_two(len(runs.ends), _LEAST_CUTS), **given, num_warps=8, num_stages=1,
    )  # fmt: skip
    lanes = min(_LANES, power_of_two(rule.value_dim, 16))
    _advance[(triton.cdiv(rule.value_dim, lanes), rule.value_heads, runs.sequences)](
        conv, mixed, rule.speed, rule.step_bias, keys, within, **rows_of,
        **in_pages(runs, first, rule.value_dim), **given, LANES=lanes, num_warps=4, num_stages=1,
    )  # fmt: skip
    width = rule.value_heads * rule.value_dim
    answers, gate = conv[:, gate_at - width : gate_at], mixed[:, gate_at : gate_at + width]
    return group_norm(
        answers, gate, rule.norm, rule.eps, groups=rule.value_heads, order="before_gate", out=out
    )
