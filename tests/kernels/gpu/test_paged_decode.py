"""Decode attention on the GPU equals its meaning, whatever shares the batch with a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.gpu import paged_decode as kernel
from kernels.gpu.decode_splits import LONG_SPLIT, MIDDLE_CONTEXT, SHORT_CONTEXT, SHORT_SPLIT, make_scratch
from kernels.gpu.paged_decode import paged_decode
from kernels.paged_decode import paged_decode as meaning
from tests.forms import sampled
from tests.kernels.gpu.paged import DTYPES, LAYER, ODD_HEADS, TOLERANCE, Heads, Paged, error, paged

SMALL = Heads(4, 2, 64, 16)


def queries(rows: int, heads: Heads, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, heads.heads, heads.head_dim, device=device, dtype=dtype)


def expected(query: torch.Tensor, memory: Paged, lengths: list[int], window: int | None) -> torch.Tensor:
    """Return the reference in float32 on the CPU."""
    rows = meaning(
        query.float().cpu(),
        memory.blocks.float().cpu(),
        LAYER,
        memory.tables.long().cpu(),
        torch.tensor(lengths),
        window,
    )
    return rows.to(query.device)


def run(
    query: torch.Tensor, memory: Paged, lengths: list[int], window: int | None = None, **kwargs: Any
) -> torch.Tensor:
    return paged_decode(
        query,
        memory.blocks,
        LAYER,
        memory.tables,
        torch.tensor(lengths, dtype=torch.int32, device=query.device),
        window=window,
        **kwargs,
    )


@pytest.mark.parametrize(
    ("heads", "window"),
    [*((heads, window) for heads in ODD_HEADS for window in (None, 13)), (ODD_HEADS[0], 1)],
    ids=str,
)
def test_paged_decode_equals_attention(heads: Heads, window: int | None, device: torch.device) -> None:
    torch.manual_seed(1)
    size = heads.block_size
    lengths = [1, size - 1, size, size + 1, 3 * size + 2, SHORT_SPLIT + 1]
    memory = paged(heads, lengths, torch.float32, device)
    query = queries(len(lengths), heads, torch.float32, device)
    assert error(run(query, memory, lengths, window), expected(query, memory, lengths, window)) < 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_decode_sums_in_float32(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(2)
    lengths = [5, SHORT_SPLIT * 2 + 3]
    memory = paged(SMALL, lengths, dtype, device)
    query = queries(2, SMALL, dtype, device)
    got = run(query, memory, lengths)
    assert got.dtype == dtype
    assert error(got, expected(query, memory, lengths, None)) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 300])
def test_long_contexts_take_long_splits(window: int | None, device: torch.device) -> None:
    torch.manual_seed(3)
    heads = Heads(2, 1, 64, 64)
    lengths = [SHORT_CONTEXT, SHORT_CONTEXT + 1, MIDDLE_CONTEXT, MIDDLE_CONTEXT + LONG_SPLIT + 7]
    memory = paged(heads, lengths, torch.float32, device)
    query = queries(len(lengths), heads, torch.float32, device)
    assert error(run(query, memory, lengths, window), expected(query, memory, lengths, window)) < 2e-6


@pytest.mark.parametrize("window", [None, 150])
def test_a_row_has_the_same_bits_alone_and_among_others(window: int | None, device: torch.device) -> None:
    torch.manual_seed(4)
    lengths = [SHORT_SPLIT * 3 + 5, 1, 17, SHORT_SPLIT, 0]
    memory = paged(SMALL, lengths, torch.bfloat16, device, width=40)
    query = queries(len(lengths), SMALL, torch.bfloat16, device)
    together = run(query, memory, lengths, window)
    for row, length in enumerate(lengths):
        one = Paged(memory.blocks, memory.tables[row : row + 1, : max(1, -(-length // 16))])
        assert torch.equal(run(query[row : row + 1].clone(), one, [length], window)[0], together[row])


def test_a_row_without_context_is_zero_and_changes_no_other(device: torch.device) -> None:
    torch.manual_seed(5)
    lengths = [0, 20, 0]
    memory = paged(SMALL, lengths, torch.float32, device)
    query = queries(3, SMALL, torch.float32, device)
    out = torch.full_like(query, torch.nan)
    got = run(query, memory, lengths, out=out)
    assert got is out
    assert (got[0] == 0).all()
    assert (got[2] == 0).all()
    assert error(got[1:2], expected(query, memory, [1, 20, 1], None)[1:2]) < 2e-6


@pytest.mark.parametrize("window", sampled([None, 13], [13]))
@pytest.mark.parametrize(
    "rule",
    [{"scale": 0.3}, {"scale": 0.4, "cap": 2.0}, {"sinks": True}, {"cap": 1.5, "sinks": True}],
    ids=str,
)
def test_scales_caps_and_sinks_of_scores(
    rule: dict[str, Any], window: int | None, device: torch.device
) -> None:
    torch.manual_seed(9)
    heads, lengths = Heads(9, 3, 64, 16), [1, 40, SHORT_SPLIT + 1, 3 * SHORT_SPLIT + 5]
    memory = paged(heads, lengths, torch.float32, device)
    query = queries(len(lengths), heads, torch.float32, device)
    sinks = torch.randn(heads.heads, device=device) * 3
    sinks[0], sinks[1] = 200.0, -200.0
    given = {**rule, "sinks": sinks if "sinks" in rule else None}
    plain = {**given, "sinks": None if given["sinks"] is None else sinks.cpu()}
    want = meaning(
        query.cpu(),
        memory.blocks.cpu(),
        LAYER,
        memory.tables.long().cpu(),
        torch.tensor(lengths),
        window,
        **plain,
    )
    got = run(query, memory, lengths, window, **given)
    assert error(got.cpu(), want) < 3e-6
    off = run(query, memory, lengths, window)
    assert error(off.cpu(), want) > 1e-2


def test_a_row_without_context_is_zero_beside_its_sink(device: torch.device) -> None:
    memory = paged(SMALL, [20], torch.float32, device)
    query = queries(2, SMALL, torch.float32, device)
    tables = Paged(memory.blocks, memory.tables.expand(2, -1).contiguous())
    sinks = torch.ones(SMALL.heads, device=device)
    assert (run(query, tables, [0, 20], sinks=sinks)[0] == 0).all()


def test_fp8_keys_and_values_are_scaled_by_head(device: torch.device) -> None:
    torch.manual_seed(6)
    lengths = [40, 3]
    plain = paged(SMALL, lengths, torch.float32, device)
    scales = torch.rand(2, 2, SMALL.kv_heads, device=device) * 0.1 + 0.01
    spread = scales[None, :, :, :, None]
    stored = Paged((plain.blocks / spread).clamp(-448, 448).to(torch.float8_e4m3fn), plain.tables)
    meant = Paged(stored.blocks.float() * spread, plain.tables)
    query = queries(2, SMALL, torch.float32, device)
    got = run(query, stored, lengths, scales=scales)
    assert error(got, expected(query, meant, lengths, None)) < 2e-6


@pytest.mark.parametrize("window", sampled([None, 2100], [None]))
def test_the_last_split_joins_as_a_pass_of_its_own_does(
    window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group of splits, two, an empty row and one split: over one scratch, which counts again."""
    torch.manual_seed(10)
    heads = Heads(6, 2, 32, 128)
    lengths = [SHORT_SPLIT * 3, 0, 16 * LONG_SPLIT + 5, 7]
    memory = paged(heads, lengths, torch.float32, device)
    query = queries(len(lengths), heads, torch.float32, device)
    sinks = torch.randn(heads.heads, device=device)
    scratch = make_scratch(4, heads.heads, heads.head_dim, 20 * LONG_SPLIT, device)
    folded = run(query, memory, lengths, window, sinks=sinks, scratch=scratch)
    assert not scratch.finished.any()
    few = Paged(memory.blocks, memory.tables[:1]), lengths[:1]
    again = run(query[:1].clone(), *few, window, sinks=sinks, scratch=scratch)
    assert torch.equal(again[0], folded[0])
    how: dict[str, Any] = {"sinks": sinks, "scratch": scratch, "apart": True}
    apart = run(query, memory, lengths, window, **how)
    assert torch.equal(folded, apart) or device.type == "cuda"
    assert error(folded, apart) < 2e-6
    monkeypatch.setattr(kernel, "join_splits", lambda *given, **how: None)
    assert not torch.equal(run(query[:1].clone(), *few, window, **how)[0], apart[0])


def test_scratch_may_be_larger_and_must_not_be_smaller(device: torch.device) -> None:
    torch.manual_seed(7)
    lengths = [SHORT_SPLIT + 9]
    memory = paged(SMALL, lengths, torch.float32, device)
    query = queries(1, SMALL, torch.float32, device)
    at = torch.tensor(lengths, dtype=torch.int32, device=device)
    large = make_scratch(3, SMALL.heads, SMALL.head_dim, 10_000, device)
    got = paged_decode(query, memory.blocks, LAYER, memory.tables, at, scratch=large)
    assert torch.equal(got, run(query, memory, lengths))
    small = make_scratch(1, SMALL.heads, SMALL.head_dim, SHORT_SPLIT, device)
    with pytest.raises(ValueError, match="too small"):
        paged_decode(query, memory.blocks, LAYER, memory.tables, at, scratch=small)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "heads", [Heads(32, 8, 128, 16), Heads(9, 3, 64, 32), Heads(16, 2, 256, 16)], ids=str
)
def test_paged_decode_of_real_model_sizes(heads: Heads, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(8)
    device = torch.device("cuda")
    lengths = [1, 777, 2048, 2049, 9000, 20_001]
    memory = paged(heads, lengths, dtype, device)
    query = queries(len(lengths), heads, dtype, device)
    assert error(run(query, memory, lengths), expected(query, memory, lengths, None)) < TOLERANCE[dtype]
