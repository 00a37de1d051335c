"""Packed prefill attention on the GPU equals its meaning, a sequence at a time, however prompts are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from diptych.engine.backends.triton.step_plan import ancestors
from kernels.gpu import paged_prefill as kernel
from kernels.gpu.paged_prefill import paged_prefill
from kernels.paged_attention import paged_attention as meaning
from tests.diptych.engine.backends.triton.reference_operators import seen_in_tree
from tests.kernels.gpu.paged import DTYPES, LAYER, ODD_HEADS, TOLERANCE, Heads, Paged, error, paged

SMALL = Heads(4, 2, 64, 16)


def run(
    query: torch.Tensor,
    memory: Paged,
    starts: list[int],
    chunks: list[int],
    window: int | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    offsets = torch.tensor([0, *chunks]).cumsum(0).int()
    return paged_prefill(
        query,
        memory.blocks,
        LAYER,
        memory.tables,
        torch.tensor(starts, dtype=torch.int32, device=query.device),
        offsets.to(query.device),
        max_tokens=max(chunks),
        context_tokens=sum(starts) + sum(chunks),
        window=window,
        **kwargs,
    )


def expected(
    query: torch.Tensor,
    memory: Paged,
    starts: list[int],
    chunks: list[int],
    window: int | None,
    trees: Sequence[torch.Tensor | None] = (),
) -> torch.Tensor:
    """Return the reference in float32 on the CPU, a sequence at a time."""
    blocks, parts = memory.blocks.float().cpu(), query.float().cpu().split(chunks)
    rows = [
        meaning(part, blocks, LAYER, table.long(), start, window, tree=tree)
        for part, table, start, tree in zip(
            parts, memory.tables.cpu(), starts, trees or [None] * len(parts), strict=True
        )
        if len(part)
    ]
    return torch.cat(rows).to(query.device)


def case(
    heads: Heads, starts: list[int], chunks: list[int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, Paged]:
    ends = [start + chunk for start, chunk in zip(starts, chunks, strict=True)]
    query = torch.randn(sum(chunks), heads.heads, heads.head_dim, device=device, dtype=dtype)
    return query, paged(heads, ends, dtype, device)


@pytest.mark.parametrize(
    ("heads", "window"),
    [*((heads, window) for heads in ODD_HEADS for window in (None, 13)), (ODD_HEADS[0], 1)],
    ids=str,
)
def test_paged_prefill_equals_causal_attention(
    heads: Heads, window: int | None, device: torch.device
) -> None:
    torch.manual_seed(1)
    starts, chunks = [0, 3, 70, 0], [1, 2 * heads.block_size + 3, 5, 33]
    query, memory = case(heads, starts, chunks, torch.float32, device)
    got = run(query, memory, starts, chunks, window)
    assert error(got, expected(query, memory, starts, chunks, window)) < 2e-6


@pytest.mark.parametrize("rule", [{}, {"window": 13}, {"cap": 2.0}, {"tree": True}, {"base": 1}], ids=str)
@pytest.mark.parametrize("kept", [torch.float32, torch.float8_e4m3fn])
def test_reading_through_the_table_equals_gathering(
    rule: dict[str, Any], kept: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(12)
    starts, chunks = [3, 40, 0], [1, 9, 33]
    query, memory = case(SMALL, starts, chunks, torch.float32, device)
    memory = Paged(memory.blocks.nan_to_num(3.0).to(kept), memory.tables)
    how: dict[str, Any] = dict(rule)
    if kept.itemsize == 1:
        how["scales"] = torch.rand(2, 2, SMALL.kv_heads, device=device) + 0.5
    if how.pop("tree", False):
        own = [torch.from_numpy(ancestors([n - 1 for n in range(count)])) for count in chunks]
        how["tree"] = torch.cat(own).to(device)
    if how.pop("base", 0):  # the memory lies a block behind what is given
        whole = torch.cat([memory.blocks[:1], memory.blocks])
        memory = Paged(whole[:-1], memory.tables)
        how["base"] = torch.tensor([whole.stride(0)], device=device)
    gathered: list[int] = []
    bring = kernel.bring_context
    monkeypatch.setattr(kernel, "bring_context", lambda *a, **k: (gathered.append(1), bring(*a, **k))[1])
    through = run(query, memory, starts, chunks, **how)
    assert not gathered, "short chunks are read through the table"
    found = kernel.look_up
    monkeypatch.setattr(kernel, "look_up", lambda *given: {**found(*given), "by_table": 0})
    apart = run(query, memory, starts, chunks, **how)
    assert gathered == [1]
    assert error(through, apart) < 2e-6
    other = Paged(memory.blocks, memory.tables.flip(0).contiguous())
    assert error(run(query, other, starts, chunks, **how), apart) > 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_prefill_sums_in_float32(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(2)
    starts, chunks = [150, 0], [40, 90]
    query, memory = case(SMALL, starts, chunks, dtype, device)
    got = run(query, memory, starts, chunks)
    assert got.dtype == dtype
    assert error(got, expected(query, memory, starts, chunks, None)) < TOLERANCE[dtype]


@pytest.mark.parametrize(("window", "by_table"), [(None, 16), (50, 16), (50, 0)])
def test_neighbours_and_cuts_change_no_bit(
    window: int | None, by_table: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    found = kernel.look_up
    monkeypatch.setattr(kernel, "look_up", lambda *given: {**found(*given), "by_table": by_table})
    starts, chunks = [0, 0], [130, 37]
    query, memory = case(SMALL, starts, chunks, torch.bfloat16, device)
    whole = run(query, memory, starts, chunks, window)
    first = Paged(memory.blocks, memory.tables[:1])
    assert torch.equal(run(query[:130].clone(), first, [0], [130], window), whole[:130])
    cut = 0
    for chunk in (1, 63, 50, 16):
        part = run(query[cut : cut + chunk].clone(), first, [cut], [chunk], window)
        assert torch.equal(part, whole[cut : cut + chunk])
        cut += chunk


def test_context_tokens_default_to_the_room_of_the_tables(device: torch.device) -> None:
    torch.manual_seed(8)
    starts, chunks = [5, 0, 40], [20, 3, 9]
    query, memory = case(SMALL, starts, chunks, torch.float32, device)
    offsets = torch.tensor([0, 20, 23, 32], dtype=torch.int32, device=device)
    at = torch.tensor(starts, dtype=torch.int32, device=device)
    got = paged_prefill(query, memory.blocks, LAYER, memory.tables, at, offsets, max_tokens=20)
    assert torch.equal(got, run(query, memory, starts, chunks))


def test_an_empty_chunk_among_others_is_skipped(device: torch.device) -> None:
    torch.manual_seed(4)
    starts, chunks = [4, 9, 0], [7, 0, 20]
    query, memory = case(SMALL, starts, chunks, torch.float32, device)
    assert error(run(query, memory, starts, chunks), expected(query, memory, starts, chunks, None)) < 2e-6


def test_rows_of_no_sequence_are_left_alone(device: torch.device) -> None:
    torch.manual_seed(5)
    query, memory = case(SMALL, [0], [20], torch.float32, device)
    out = torch.full_like(query, 7.0)
    run(query, memory, [0], [12], out=out)
    assert (out[12:] == 7.0).all()
    assert error(out[:12], expected(query[:12], memory, [0], [12], None)) < 2e-6


@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize(
    "rule",
    [{"scale": 0.3}, {"scale": 0.4, "cap": 2.0}, {"sinks": True}, {"cap": 1.5, "sinks": True}],
    ids=str,
)
def test_scales_caps_and_sinks_of_scores(
    rule: dict[str, Any], window: int | None, device: torch.device
) -> None:
    torch.manual_seed(9)
    heads, starts, chunks = Heads(6, 3, 64, 16), [0, 40], [21, 30]
    query, memory = case(heads, starts, chunks, torch.float32, device)
    sinks = torch.randn(heads.heads, device=device) * 3
    sinks[0], sinks[1] = 200.0, -200.0
    given = {**rule, "sinks": sinks if "sinks" in rule else None}
    plain = {**given, "sinks": None if given["sinks"] is None else sinks.cpu()}
    parts = zip(query.cpu().split(chunks), memory.tables.cpu(), starts, strict=True)
    want = torch.cat(
        [
            meaning(part, memory.blocks.cpu(), LAYER, table.long(), start, window, **plain)
            for part, table, start in parts
        ]
    )
    assert error(run(query, memory, starts, chunks, window, **given).cpu(), want) < 3e-6
    assert error(run(query, memory, starts, chunks, window).cpu(), want) > 1e-2


def test_fp8_keys_and_values_are_scaled_by_head(device: torch.device) -> None:
    torch.manual_seed(6)
    query, plain = case(SMALL, [30], [20], torch.float32, device)
    scales = torch.rand(2, 2, SMALL.kv_heads, device=device) * 0.1 + 0.01
    spread = scales[None, :, :, :, None]
    stored = Paged((plain.blocks / spread).clamp(-448, 448).to(torch.float8_e4m3fn), plain.tables)
    meant = Paged(stored.blocks.float() * spread, plain.tables)
    got = run(query, stored, [30], [20], scales=scales)
    assert error(got, expected(query, meant, [30], [20], None)) < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "heads",
    [Heads(32, 8, 128, 16), Heads(9, 3, 64, 32), Heads(12, 12, 80, 16), Heads(16, 2, 256, 16)],
    ids=str,
)
def test_paged_prefill_of_real_model_sizes(heads: Heads, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(7)
    starts, chunks = [0, 1000, 3001], [1111, 257, 1]
    query, memory = case(heads, starts, chunks, dtype, torch.device("cuda"))
    got = run(query, memory, starts, chunks)
    assert error(got, expected(query, memory, starts, chunks, None)) < TOLERANCE[dtype]


@pytest.mark.parametrize("heads", ODD_HEADS[:3], ids=str)
@pytest.mark.parametrize("window", [None, 70])
def test_tokens_of_a_tree_see_their_ancestors_alone(
    heads: Heads, window: int | None, device: torch.device
) -> None:
    torch.manual_seed(6)
    starts, parents = [75, 3, 0], [[-1, 0, 0, 1, 2, 1, 5], [-1, *([0] * 40), *range(1, 24)], [-1, -1, 1]]
    chunks = [len(one) for one in parents]
    query, memory = case(heads, starts, chunks, torch.float32, device)
    tree = torch.from_numpy(np.concatenate([ancestors(one) for one in parents])).to(device)
    got = run(query, memory, starts, chunks, window, tree=tree)
    seen = [seen_in_tree(part) for part in tree[:, 0].cpu().split(chunks)]
    wanted = expected(query, memory, starts, chunks, window, seen)
    assert error(got, wanted) < 2e-6
    off = tree.clone()
    off[5, 0] ^= 1 << 2  # a brother of its parent, control
    assert error(run(query, memory, starts, chunks, window, tree=off), wanted) > 1e-3
