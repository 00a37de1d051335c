"""Attention in one order of sums: the meaning, and the bits of a token decoded, in any chunk and any step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.gpu.invariant_attention import SPLIT, invariant_prefill
from kernels.gpu.invariant_decode import invariant_decode, make_invariant_scratch
from kernels.gpu.paged_decode import paged_decode
from kernels.gpu.paged_prefill import paged_prefill
from kernels.paged_attention import paged_attention as meaning
from tests.forms import sampled
from tests.kernels.gpu.paged import DTYPES, LAYER, ODD_HEADS, TOLERANCE, Heads, Paged, error, paged

SMALL = Heads(4, 2, 64, 16)
LENGTH = SPLIT + 61
PLACES = (0, 15, 64, SPLIT - 1, SPLIT, LENGTH - 1)


def chunk(
    query: torch.Tensor, memory: Paged, begin: int, end: int, operator: Any = invariant_prefill, **rule: Any
) -> torch.Tensor:
    """Compute positions `begin` to `end` of the first sequence, a chunk alone."""
    bounds = [
        torch.tensor(one, dtype=torch.int32, device=query.device) for one in ([begin], [0, end - begin])
    ]
    return operator(
        query[begin:end].clone(),
        memory.blocks,
        LAYER,
        memory.tables[:1],
        *bounds,
        max_tokens=end - begin,
        **rule,
    )


def decode(
    query: torch.Tensor, memory: Paged, places: list[int], operator: Any = invariant_decode, **rule: Any
) -> torch.Tensor:
    """Compute a decode step whose rows are positions of the first sequence."""
    lengths = torch.tensor(places, dtype=torch.int32, device=query.device) + 1
    tables = memory.tables[:1].expand(len(places), -1).contiguous()
    return operator(query[places], memory.blocks, LAYER, tables, lengths, **rule)


def case(heads: Heads, length: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, Paged]:
    torch.manual_seed(7)
    query = torch.randn(length, heads.heads, heads.head_dim, device=device).to(dtype)
    return query, paged(heads, [length], dtype, device)


RULES: list[dict[str, Any]] = [{}, {"window": 50}, {"window": 90, "cap": 2.0, "sinks": True, "scale": 0.2}]


@pytest.mark.parametrize(("heads", "rule"), sampled(
    [(heads, rule) for heads in ODD_HEADS for rule in RULES], [(ODD_HEADS[0], RULES[2]), (ODD_HEADS[2], {})]
))  # fmt: skip
def test_both_forms_equal_causal_attention(heads: Heads, rule: dict[str, Any], device: torch.device) -> None:
    query, memory = case(heads, 2 * heads.block_size + 37, torch.float32, device)
    if "sinks" in rule:
        rule = rule | {"sinks": torch.randn(heads.heads, device=device)}
    begin, end = 3, len(query)
    there = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in rule.items()}
    window = there.pop("window", None)
    expected = meaning(
        query[begin:].cpu(), memory.blocks.cpu(), LAYER, memory.tables[0].long().cpu(), begin, window, **there
    )
    assert error(chunk(query, memory, begin, end, **rule).cpu(), expected) < 2e-6
    last = decode(query, memory, [end - 1], **rule)
    assert error(last.cpu(), expected[-1:]) < 2e-6


@pytest.mark.parametrize("dtype", [pytest.param(DTYPES[0], marks=pytest.mark.full), *DTYPES[1:]])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_token_has_the_same_bits_decoded_and_in_any_chunk(
    dtype: torch.dtype, rule: dict[str, Any], device: torch.device
) -> None:
    query, memory = case(SMALL, LENGTH, dtype, device)
    if "sinks" in rule:
        rule = rule | {"sinks": torch.randn(SMALL.heads, device=device)}
    whole = chunk(query, memory, 0, LENGTH, **rule)
    decoded = decode(query, memory, list(PLACES), **rule)
    for number, place in enumerate(PLACES):
        assert torch.equal(decoded[number], whole[place])
        assert torch.equal(decode(query, memory, [place], **rule)[0], whole[place])
    for begin, end in ((0, 1), (13, 18), (SPLIT - 3, SPLIT + 2), (LENGTH - 40, LENGTH)):
        assert torch.equal(chunk(query, memory, begin, end, **rule), whole[begin:end])


def test_the_default_kernels_differ_between_a_chunk_and_a_decode_step(device: torch.device) -> None:
    """The control: what the test above compares is not alike by itself."""
    query, memory = case(SMALL, LENGTH, torch.bfloat16, device)
    whole = chunk(query, memory, 0, LENGTH, paged_prefill)
    decoded = decode(query, memory, list(PLACES), paged_decode)
    assert not torch.equal(decoded, whole[list(PLACES)])
    assert error(decoded, whole[list(PLACES)]) < 2 * TOLERANCE[torch.bfloat16]


def test_an_fp8_cache_has_the_same_bits_in_both(device: torch.device) -> None:
    query, memory = case(SMALL, 100, torch.float32, device)
    kept = Paged(memory.blocks.nan_to_num().to(torch.float8_e4m3fn), memory.tables)
    scales = torch.rand(2, 2, SMALL.kv_heads, device=device) + 0.5
    whole = chunk(query, kept, 0, 100, scales=scales)
    assert torch.equal(decode(query, kept, [99, 30], scales=scales), whole[[99, 30]])
    assert not torch.equal(decode(query, kept, [99], scales=scales * 1.01), whole[99:])
    expected = meaning(
        query.cpu(), kept.blocks.cpu(), LAYER, kept.tables[0].long().cpu(), 0, None, scales.cpu()
    )
    assert error(whole.cpu(), expected) < 2e-6


def test_packed_sequences_padding_and_a_memory_found_through_the_device(device: torch.device) -> None:
    """Neighbours change no bit; rows of no sequence are left; a length of 0 is zero."""
    torch.manual_seed(2)
    memory = paged(SMALL, [40, 70], torch.bfloat16, device)
    query = torch.randn(60, 4, 64, device=device).to(torch.bfloat16)
    starts = torch.tensor([10, 45], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 30, 55], dtype=torch.int32, device=device)
    out = torch.full_like(query, 7.0)
    tables = memory.tables
    invariant_prefill(query, memory.blocks, LAYER, tables, starts, offsets, max_tokens=30, out=out)
    assert bool((out[55:] == 7.0).all())
    alone = invariant_prefill(
        query[30:55].clone(), memory.blocks, LAYER, tables[1:], starts[1:], offsets[1:] - 30, max_tokens=25
    )
    assert torch.equal(alone, out[30:55])
    base = torch.tensor([memory.blocks[1:].numel()], device=device)
    beside = torch.cat([torch.full_like(memory.blocks, torch.nan), memory.blocks])
    shift = torch.tensor([beside[len(memory.blocks) :].storage_offset()], device=device)
    assert int(shift) % 16 == 0 == int(base) % 16
    found = invariant_prefill(
        query,
        beside,
        LAYER,
        tables,
        starts,
        offsets,
        max_tokens=30,
        base=shift,
        out=torch.full_like(query, 7.0),
    )
    assert torch.equal(found, out)
    lengths = torch.tensor([0, 70], dtype=torch.int32, device=device)
    rows = invariant_decode(query[53:55], memory.blocks, LAYER, tables, lengths)
    assert not bool(rows[0].any())
    assert torch.equal(rows[1], out[54])


def test_trees_and_too_little_scratch_are_refused(device: torch.device) -> None:
    query, memory = case(SMALL, 20, torch.bfloat16, device)
    with pytest.raises(ValueError, match="tree of tokens"):
        chunk(query, memory, 0, 4, tree=torch.zeros(4, 2, dtype=torch.int64, device=device))
    scratch = make_invariant_scratch(1, 4, 64, 20, device)
    with pytest.raises(ValueError, match="too small"):
        decode(query, memory, [3, 4], scratch=scratch)
