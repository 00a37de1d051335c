"""Prefill attention with products of FP8 equals its meaning, and 16-bit attention as far as FP8 goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.fp8_attention import fp8_attention, round_queries
from kernels.fp8_cache import DTYPE
from kernels.gpu import fp8_prefill as module
from kernels.gpu.fp8_prefill import fp8_prefill, fp8_tile, lacks_fp8
from kernels.gpu.paged_prefill import paged_prefill
from kernels.gpu.tuning import prefill_bytes
from tests.kernels.gpu.paged import LAYER, LAYERS, ODD_HEADS, Heads, Paged, error
from tests.kernels.gpu.test_paged_prefill import SMALL, case

TILE = dict(fp8_tile(64, 227 << 10))["tile"]
CLOSE = 2e-3
"""Bound of `error` from the meaning in the same tiles: where scores differ in a last place, a weight may
round the other way."""
FAR = 1e-2
ROUNDING = 0.06
"""Bound of `error` from products of float32: three places of queries and weights."""


@pytest.fixture(autouse=True)
def card(device: torch.device) -> None:
    if (why := lacks_fp8(device, SMALL.head_dim)) is not None:
        pytest.skip(why)


def fp8_case(
    heads: Heads, starts: list[int], chunks: list[int], device: torch.device
) -> tuple[torch.Tensor, Paged, torch.Tensor]:
    """Return queries whose rows are of unlike size, blocks in FP8, and their scales."""
    query, plain = case(heads, starts, chunks, torch.float32, device)
    query *= torch.rand(*query.shape[:2], 1, device=device) * 3 + 0.01
    scales = torch.rand(LAYERS, 2, heads.kv_heads, device=device) * 0.1 + 0.01
    stored = (plain.blocks / scales[None, :, :, :, None]).clamp(-448, 448).to(DTYPE)
    return query, Paged(stored, plain.tables), scales


def run(
    query: torch.Tensor,
    memory: Paged,
    starts: list[int],
    chunks: list[int],
    by: Any = fp8_prefill,
    **rule: Any,
) -> torch.Tensor:
    offsets = torch.tensor([0, *chunks]).cumsum(0).int().to(query.device)
    at = torch.tensor(starts, dtype=torch.int32, device=query.device)
    rule = {"max_tokens": max(chunks), "context_tokens": sum(starts) + sum(chunks), **rule}
    found: torch.Tensor = by(query, memory.blocks, LAYER, memory.tables, at, offsets, **rule)
    return found


def expected(
    query: torch.Tensor, memory: Paged, starts: list[int], chunks: list[int], tile: int = TILE, **rule: Any
) -> torch.Tensor:
    """Return the meaning on the CPU, a sequence at a time."""
    rule = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in rule.items()}
    parts = zip(query.cpu().split(chunks), memory.tables.cpu(), starts, strict=True)
    rows = [
        fp8_attention(
            part, memory.blocks.cpu(), LAYER, table.long(), start, rule.get("window"), rule["scales"],
            tile=tile, **{name: rule.get(name) for name in ("scale", "cap", "sinks")},
        )
        for part, table, start in parts
        if len(part)
    ]  # fmt: skip
    return torch.cat(rows).to(query.device)


@pytest.mark.parametrize(
    ("heads", "window"),
    [(SMALL, None), (SMALL, 50), (SMALL, 1), (Heads(6, 2, 80, 16), 13), (ODD_HEADS[4], None)], ids=str,
)  # fmt: skip
def test_fp8_prefill_equals_its_meaning(heads: Heads, window: int | None, device: torch.device) -> None:
    torch.manual_seed(1)
    starts, chunks = [0, 3, 150, 9, 0], [1, 140, 5, 0, 33]
    query, memory, scales = fp8_case(heads, starts, chunks, device)
    rule = {"scales": scales, "window": window}
    got = run(query, memory, starts, chunks, **rule)
    assert error(got, expected(query, memory, starts, chunks, **rule)) < CLOSE
    if window is not None:
        other = {**rule, "window": window + 1}
        assert error(got, expected(query, memory, starts, chunks, **other)) > FAR
    for part in (0, 1):  # scales of keys, or of values, are left out
        left_out = scales.clone()
        left_out[:, part] = 1.0
        assert error(got, expected(query, memory, starts, chunks, **{**rule, "scales": left_out})) > FAR or (
            window == 1 and part == 0
        )


@pytest.mark.parametrize(
    "rule", [{"scale": 0.4, "cap": 2.0}, {"sinks": True}, {"cap": 1.5, "sinks": True}], ids=str
)
def test_scales_caps_and_sinks_of_scores(rule: dict[str, Any], device: torch.device) -> None:
    torch.manual_seed(2)
    heads, starts, chunks = Heads(6, 3, 64, 16), [0, 130], [21, 30]
    query, memory, scales = fp8_case(heads, starts, chunks, device)
    sinks = torch.randn(heads.heads, device=device) * 3
    sinks[0], sinks[1] = 200.0, -200.0
    given = {**rule, "scales": scales, "window": 90}
    if "sinks" in rule:
        given["sinks"] = sinks
    got = run(query, memory, starts, chunks, **given)
    assert error(got, expected(query, memory, starts, chunks, **given)) < CLOSE
    for name in rule:
        assert error(got, expected(query, memory, starts, chunks, **{**given, name: None})) > FAR


@pytest.mark.parametrize("window", [None, 50])
def test_products_are_those_of_16_bits_but_for_rounding(window: int | None, device: torch.device) -> None:
    torch.manual_seed(3)
    query, memory, scales = fp8_case(SMALL, [30], [120], device)
    rule = {"scales": scales, "window": window}
    got, plain = (
        run(query, memory, [30], [120], **rule),
        run(query, memory, [30], [120], paged_prefill, **rule),
    )
    assert 10 * CLOSE < error(got, plain) < ROUNDING, "queries and weights are rounded"


@pytest.mark.parametrize("window", [None, 50])
def test_neighbours_and_cuts_change_no_bit(window: int | None, device: torch.device) -> None:
    torch.manual_seed(4)
    query, memory, scales = fp8_case(SMALL, [0, 0], [150, 37], device)
    rule = {"scales": scales, "window": window}
    whole = run(query, memory, [0, 0], [150, 37], **rule)
    first, cut = Paged(memory.blocks, memory.tables[:1]), 0
    for chunk in (1, 127, 22):
        part = run(query[cut : cut + chunk].clone(), first, [cut], [chunk], **rule)
        assert torch.equal(part, whole[cut : cut + chunk])
        cut += chunk


def test_rows_of_no_sequence_are_left_alone_and_results_are_of_the_query_s_type(device: torch.device) -> None:
    torch.manual_seed(5)
    query, memory, scales = fp8_case(SMALL, [0], [20], device)
    query = query.bfloat16()
    out = torch.full_like(query, 7.0)
    run(query, memory, [0], [12], scales=scales, out=out)
    assert out.dtype == torch.bfloat16
    assert (out[12:] == 7.0).all()
    assert error(out[:12], expected(query[:12], memory, [0], [12], scales=scales)) < 1.2e-2


def test_a_memory_found_through_the_device_has_the_same_bits(device: torch.device) -> None:
    torch.manual_seed(6)
    query, memory, scales = fp8_case(SMALL, [7], [20], device)
    base = torch.zeros(1, dtype=torch.int64, device=device)
    plain = run(query, memory, [7], [20], scales=scales)
    assert torch.equal(run(query, memory, [7], [20], scales=scales, base=base), plain)


def test_trees_are_multiplied_in_16_bits(device: torch.device) -> None:
    torch.manual_seed(7)
    query, memory, scales = fp8_case(SMALL, [40], [3], device)
    rule = {"scales": scales, "tree": torch.tensor([[1, 0], [3, 1], [5, 1]], device=device)}
    assert torch.equal(
        run(query, memory, [40], [3], **rule), run(query, memory, [40], [3], paged_prefill, **rule)
    )


def test_queries_have_a_scale_a_row() -> None:
    rounded, scales = round_queries(torch.tensor([[[1.0, -896.0], [0.0, 0.0]]]))
    assert scales[0, 0] == 2.0
    assert rounded.float().tolist() == [[[0.5, -448.0], [0.0, 0.0]]]


def test_other_caches_are_refused(device: torch.device) -> None:
    query, memory = case(SMALL, [0], [5], torch.bfloat16, device)
    with pytest.raises(TypeError, match=r"bfloat16: products of FP8 take a cache of torch\.float8_e4m3fn"):
        run(query, memory, [0], [5], scales=torch.ones(2, 2, 2, device=device))


@pytest.mark.parametrize("memory", [227 << 10, 99 << 10])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_fit_the_memory_of_a_program(memory: int, head_dim: int) -> None:
    tile = dict(fp8_tile(head_dim, memory))
    assert prefill_bytes(head_dim, 1, tile["rows"], tile["tile"], tile["num_stages"]) < memory
    assert tile["tile"] >= 32


def test_cards_and_heads_that_cannot_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lacks_fp8(torch.device("cpu"), 128) is None
    assert "heads of 72: multiples of 16" in (lacks_fp8(torch.device("cpu"), 72) or "")
    monkeypatch.setattr(module.torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "compute capability 8.0: products of FP8 begin with 8.9" in (
        lacks_fp8(torch.device("cuda"), 128) or ""
    )
