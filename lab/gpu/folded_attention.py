"""Attention with what was folded into it, beside the launches that it spares: for a card to decide."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch

from kernels.fp8_cache import DTYPE
from lab.gpu.paged_case import BLOCK_SIZE, HEAD_DIM, HEADS, KV_HEADS, paged_case, random_query
from lab.gpu.section import Context, Figure, Unmeasured, figure
from lab.gpu.timing import measure

_DECODE = ((1, 2050), (16, 2050), (64, 2050), (1, 131_072))
_DRY_DECODE = ((2, 40),)
_CHUNKS = ((1, 128, 2048), (1, 512, 512), (8, 5, 4096))
"""Sequences, tokens of the chunk of each, and tokens with it."""
_DRY_CHUNKS = ((2, 5, 40),)
_LARGEST_ERROR, _FP8_ERROR = 0.02, 0.1


def folded_figures(context: Context, section: str, device: torch.device) -> Iterator[Figure]:
    """Yield decode attention that rotates, writes and joins, beside three launches; short chunks read through
    the block table, beside gathered ones; and decode rows in FP8, on cards that multiply so.

    Raises Unmeasured where both say something else.
    """
    for rows, tokens in context.pick(_DECODE, _DECODE[:3], _DRY_DECODE):
        yield _decode(context, section, device, rows, tokens)
    for sequences, chunk, tokens in context.pick(_CHUNKS, _CHUNKS, _DRY_CHUNKS):
        yield _chunks(context, section, device, sequences, chunk, tokens)
    yield from _eight(context, section, device, *context.pick((32, 16_384), (32, 16_384), _DRY_DECODE[0]))


def _decode(context: Context, section: str, device: torch.device, rows: int, tokens: int) -> Figure:
    from kernels.gpu.decode_rotary import FreshRows
    from kernels.gpu.decode_splits import make_scratch
    from kernels.gpu.paged_decode import paged_decode
    from kernels.gpu.rotary_write import rotary_write

    name = f"decode, batch {rows}, context {tokens}, folded"
    context.say(name)
    case, query = paged_case(rows, tokens, device), random_query(rows, device)
    lengths = torch.full((rows,), tokens, dtype=torch.int32, device=device)
    angles = torch.rand(rows, HEAD_DIM // 2, device=device)
    fresh = FreshRows(
        torch.randn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16),
        angles.cos(), angles.sin(), case.tables[:, (tokens - 1) // BLOCK_SIZE].long(),
        torch.full((rows,), (tokens - 1) % BLOCK_SIZE, dtype=torch.int32, device=device),
    )  # fmt: skip
    scratch, out = make_scratch(rows, HEADS, HEAD_DIM, tokens + 16, device), torch.empty_like(query)
    run = partial(paged_decode, query, case.blocks, 0, case.tables, lengths, scratch=scratch, out=out)

    def apart() -> torch.Tensor:
        rotary_write(
            fresh.qkv, fresh.cos, fresh.sin, case.blocks, 0, fresh.block_ids, fresh.lanes, heads=HEADS,
            kv_heads=KV_HEADS, out=query,
        )  # fmt: skip
        return run(apart=True)

    works: dict[str, Any] = {"folded": partial(run, fresh=fresh), "apart": apart}
    _same(context, name, works["folded"], apart, _LARGEST_ERROR)
    times = measure(context, works, rounds=20)
    mine = times["folded"]
    return figure(
        section, name, mine.median_s * 1e6, "µs", against="three launches",
        ratio=times["apart"].median_s / mine.median_s, note=mine.note(),
    )  # fmt: skip


def _chunks(
    context: Context, section: str, device: torch.device, sequences: int, chunk: int, tokens: int
) -> Figure:
    from kernels.gpu import paged_prefill as module
    from kernels.gpu.tuning import look_up

    name = f"prefill, {sequences} x {chunk} tokens of {tokens}, through the table"
    context.say(name)
    case, query = paged_case(sequences, tokens, device), random_query(sequences * chunk, device)
    starts = torch.full((sequences,), tokens - chunk, dtype=torch.int32, device=device)
    offsets = (torch.arange(sequences + 1, device=device) * chunk).int()
    rule: dict[str, Any] = {"max_tokens": chunk, "context_tokens": sequences * tokens}
    out = torch.empty_like(query)

    def work(by_table: int) -> torch.Tensor:
        with mock.patch.object(module, "look_up", lambda *given: {**look_up(*given), "by_table": by_table}):
            return module.paged_prefill(query, case.blocks, 0, case.tables, starts, offsets, **rule, out=out)

    works = {"table": partial(work, 1 << 30), "gathered": partial(work, 0)}
    _same(context, name, works["table"], works["gathered"], _LARGEST_ERROR)
    times = measure(context, works, rounds=20)
    mine = times["table"]
    return figure(
        section, name, mine.median_s * 1e6, "µs", against="gathered",
        ratio=times["gathered"].median_s / mine.median_s, note=mine.note(),
    )  # fmt: skip


def _eight(context: Context, section: str, device: torch.device, rows: int, tokens: int) -> Iterator[Figure]:
    from kernels.gpu.decode_splits import make_scratch
    from kernels.gpu.fp8_decode import lacks_fp8_decode
    from kernels.gpu.paged_decode import paged_decode

    name = f"decode, batch {rows}, context {tokens}, products of FP8"
    context.say(name)
    if (why := lacks_fp8_decode(device, HEAD_DIM)) is not None:
        context.say(why)
        return
    case, query = paged_case(rows, tokens, device), random_query(rows, device)
    blocks, scales = case.blocks.to(DTYPE), torch.full((1, 2, KV_HEADS), 0.5, device=device)
    lengths = torch.full((rows,), tokens, dtype=torch.int32, device=device)
    scratch, out = make_scratch(rows, HEADS, HEAD_DIM, tokens + 16, device), torch.empty_like(query)
    run = partial(
        paged_decode, query, blocks, 0, case.tables, lengths, scales=scales, scratch=scratch, out=out
    )
    works: dict[str, Any] = {"FP8": partial(run, eight=True), "16 bits": run}
    _same(context, name, works["FP8"], run, _FP8_ERROR)
    times = measure(context, works, rounds=20)
    mine = times["FP8"]
    yield figure(
        section, name, mine.median_s * 1e6, "µs", against="16 bits, the same cache",
        ratio=times["16 bits"].median_s / mine.median_s, note=mine.note(),
    )  # fmt: skip


def _same(context: Context, name: str, one: Any, other: Any, most: float) -> None:
    """Run both once. Raises Unmeasured where their results lie further apart than `most` of the norm."""
    got, right = one().float().clone(), other().float().clone()
    error = float((got - right).norm() / right.norm())
    if not error < (1.0 if context.dry else most):  # the interpreter cuts bfloat16 off
        raise Unmeasured(f"{name}: the two ways differ by {error:.3g}")
