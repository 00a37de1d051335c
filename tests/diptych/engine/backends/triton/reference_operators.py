"""The operators of a GPU step as their torch meanings, for tests of whole steps."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from diptych.engine.backends.torch.decoder import gated
from diptych.engine.backends.triton.operators import Operators
from diptych.engine.models.shape import Activation
from diptych.engine.sampling.random import sample_token
from diptych.engine.sampling.sample_row import SampleRow, SamplingParams
from kernels import (
    causal_conv,
    kv_blocks,
    packed_matrix,
    packed_stack,
    paged_attention,
    rms_norm,
    rotary,
    scaled_matrix,
    state_pages,
)
from kernels import paged_decode as decode
from kernels.adapted_linear import SlotChange, adapted_linear
from kernels.gpu.change_table import ChangeTable
from kernels.route_experts import route_experts
from kernels.sum_parts import sum_parts
from tests.kernels import recurrent_meanings

UNSIGNED = 1 << 64


def _paged_decode(
    query: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    scratch: Any = None,
    out: torch.Tensor,
) -> torch.Tensor:
    assert scratch is not None
    rows, width = scratch
    assert len(query) <= rows
    assert tables.shape[1] * blocks.shape[-1] // query.shape[-1] <= width
    # A length of 0 is padding: any finite answer will do, and nothing need be read.
    seen = lengths.clamp(min=1)
    rule: dict[str, Any] = {"scale": scale, "cap": cap, "sinks": sinks}
    mixed = decode.paged_decode(query, blocks, layer, tables.long(), seen.long(), window, scales, **rule)
    return out.copy_(mixed)


def _paged_prefill(
    query: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    starts: torch.Tensor,
    offsets: torch.Tensor,
    *,
    max_tokens: int,
    context_tokens: int,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    rule: dict[str, Any] = {"scale": scale, "cap": cap, "sinks": sinks}
    bounds = offsets.tolist()
    assert bounds[0] == 0
    if base is None:
        assert bounds[-1] == len(query)
        assert max_tokens == max(end - begin for begin, end in pairwise(bounds))
        assert context_tokens == int(starts.sum()) + len(query)
    else:  # a recorded step, whose last rows may be padding
        assert bounds[-1] <= len(query)
        assert context_tokens >= int(starts.sum()) + bounds[-1]
        blocks = _memory_at(blocks, base, int(tables.max()) + 1)
    for row, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            continue
        rule["tree"] = None if tree is None else seen_in_tree(tree[begin:end, 0])
        out[begin:end] = paged_attention.paged_attention(
            query[begin:end], blocks, layer, tables[row].long(), int(starts[row]), window, scales, **rule
        )
    return out


def _memory_at(anchor: torch.Tensor, base: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` blocks of the memory that lies `base` numbers from `anchor`, which has their layout."""
    size, address = count * anchor.stride(0), anchor.data_ptr() + int(base) * anchor.itemsize
    memory = (ctypes.c_char * (size * anchor.itemsize)).from_address(address)
    flat = torch.frombuffer(memory, dtype=anchor.dtype)
    return flat.as_strided((count, *anchor.shape[1:]), anchor.stride())


def seen_in_tree(bits: torch.Tensor) -> torch.Tensor:
    """Return bool `[tokens, tokens]` for the int64 `[tokens]` of what each token of a tree sees."""
    return (bits[:, None] >> torch.arange(len(bits), device=bits.device)) & 1 != 0


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(rms_norm.rms_norm(x, weight, eps))


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor
) -> torch.Tensor:
    residual += x
    return out.copy_(rms_norm.rms_norm(residual, weight, eps))


def _sum_parts(parts: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(sum_parts(parts))


def _sum_parts_rms_norm(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor
) -> torch.Tensor:
    return _add_rms_norm(sum_parts(parts), residual, weight, eps, out=out)


def _rotary_write(
    qkv: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    blocks: torch.Tensor,
    layer: int,
    block_ids: torch.Tensor,
    lanes: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_late: bool,
    eps: float,
    scales: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)

    def normed(x: torch.Tensor, norm: torch.Tensor | None, late: bool) -> torch.Tensor:
        return x if norm is None or late != norm_late else rms_norm.rms_norm(x.to(qkv.dtype), norm, eps)

    q, k = normed(q, q_norm, False), normed(k, k_norm, False)
    if cos is not None and sin is not None:
        q, k = rotary.rotary(q.float(), cos, sin), rotary.rotary(k.float(), cos, sin)
    q, k = normed(q, q_norm, True), normed(k, k_norm, True)
    written = block_ids >= 0
    if base is not None:
        blocks = _memory_at(blocks, base, max(int(block_ids.max()), 0) + 1)
    kv_blocks.write_kv_rows(
        blocks,
        layer,
        block_ids[written],
        lanes[written].long(),
        k[written],
        v[written],
        scales,
    )
    return out.copy_(q)


def _skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor
) -> torch.Tensor:
    assert len(x) <= 16
    assert x.dtype.itemsize == 2
    wide = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return out.copy_(wide)


def _skinny_swiglu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: Activation,
    limit: float | None,
    out: torch.Tensor,
) -> torch.Tensor:
    both = _skinny_linear(x, weight, bias, out=x.new_empty(len(x), len(weight)))
    return out.copy_(gated(activation, both, limit))


def _swiglu(
    gate_up: torch.Tensor, *, activation: Activation, limit: float | None, out: torch.Tensor
) -> torch.Tensor:
    return out.copy_(gated(activation, gate_up, limit))


@dataclass
class _Routed:
    """Experts and weights of rows, and room for them."""

    experts: torch.Tensor
    weights: torch.Tensor
    held: range | None = None

    def rows(self, tokens: int) -> _Routed:
        return _Routed(self.experts[:tokens], self.weights[:tokens])

    def among(self, held: range) -> _Routed:
        return replace(self, held=held)


def _make_routed(rows: int, experts: int, count: int, device: torch.device) -> _Routed:
    return _Routed(torch.zeros(rows, count, dtype=torch.int64), torch.zeros(rows, count))


def _router_logits(
    x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor
) -> torch.Tensor:
    return out.copy_(functional.linear(x.float(), router, bias))


def _route_experts(
    x: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    *,
    out: _Routed,
    **choice: Any,
) -> _Routed:
    experts, weights = route_experts(functional.linear(x.float(), router, bias), correction, **choice)
    out.experts.copy_(experts)
    out.weights.copy_(weights)
    return out


def _order_rows(experts: torch.Tensor, count: int) -> _Routed:
    return _Routed(experts, torch.empty(0))


def _of_pairs(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, routed: _Routed
) -> torch.Tensor:
    """Multiply each row of `x` with the matrix of its expert; pairs stay in their order here.

    Those of experts that are not held are no numbers: nothing may read them.
    """

    def multiply(one: torch.Tensor, expert: int) -> torch.Tensor:
        at = expert if routed.held is None else expert - routed.held.start
        if not 0 <= at < len(weight):
            return torch.full((weight.shape[1],), torch.nan)
        return functional.linear(one.float(), weight[at].float(), None if bias is None else bias[at].float())

    pairs = zip(x, routed.experts.flatten().tolist(), strict=True)
    return torch.stack([multiply(one, expert) for one, expert in pairs]).to(x.dtype)


def _expert_swiglu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    routed: _Routed,
    *,
    activation: Activation,
    limit: float | None,
    out: torch.Tensor,
) -> torch.Tensor:
    pairs = x.repeat_interleave(routed.experts.shape[1], dim=0)
    return out.copy_(gated(activation, _of_pairs(pairs, weight, bias, routed), limit))


def _expert_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, routed: _Routed, *, out: torch.Tensor
) -> torch.Tensor:
    """Write the pairs of experts that are held; others stay as they are."""
    held = range(len(weight)) if routed.held is None else routed.held
    experts = routed.experts.flatten()
    here = (experts >= held.start) & (experts < held.stop)
    out[here] = _of_pairs(x, weight, bias, routed)[here]
    return out


def _packed_expert_swiglu(
    x: torch.Tensor,
    weight: packed_stack.PackedStack,
    bias: torch.Tensor | None,
    routed: _Routed,
    *,
    activation: Activation,
    limit: float | None,
    out: torch.Tensor,
) -> torch.Tensor:
    numbers = packed_stack.dequantise(weight).to(x.dtype)
    return _expert_swiglu(x, numbers, bias, routed, activation=activation, limit=limit, out=out)


def _packed_expert_linear(
    x: torch.Tensor,
    weight: packed_stack.PackedStack,
    bias: torch.Tensor | None,
    routed: _Routed,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    return _expert_linear(x, packed_stack.dequantise(weight).to(x.dtype), bias, routed, out=out)


def _sum_experts(
    parts: torch.Tensor,
    routed: _Routed,
    shared: torch.Tensor | None,
    switch: torch.Tensor | None,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    every = parts.view(*routed.experts.shape, -1).float() * routed.weights.unsqueeze(-1)
    if (held := routed.held) is not None:
        there = (routed.experts >= held.start) & (routed.experts < held.stop)
        every = torch.where(there.unsqueeze(-1), every, 0.0)
    found = every.sum(1)
    if shared is not None:
        found = found + (shared.float() if switch is None else shared.float() * torch.sigmoid(switch))
    return out.copy_(found)


def _sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    scratch: Any,
    out: torch.Tensor,
) -> torch.Tensor:
    for row, scores in enumerate(logits.numpy()):
        params = SamplingParams(
            temperature=float(temperature[row]),
            top_k=int(top_k[row]),
            top_p=float(top_p[row]),
            min_p=float(min_p[row]),
            seed=int(seeds[row]) % UNSIGNED,
        )
        if not bool(torch.isfinite(logits[row]).all()):
            out[row] = -1
        elif params.greedy:
            out[row] = int(scores.argmax())
        else:
            out[row] = sample_token(scores, SampleRow(params, (), range(int(positions[row]))))
    return out


def _adapted_linear(
    x: torch.Tensor,
    out: torch.Tensor,
    slots: torch.Tensor,
    table: ChangeTable,
    scratch: torch.Tensor,
    most_ranks: int,
) -> torch.Tensor:
    assert len(scratch) >= len(x) * len(table.a) * most_ranks

    def change(matrix: int, slot: int) -> SlotChange | None:
        rank, width = int(table.ranks[matrix, slot]), int(table.widths[matrix])
        if rank == 0:
            return None
        a = _matrix_at(int(table.a[matrix, slot]), rank, x.shape[1], x.dtype)
        b = _matrix_at(int(table.b[matrix, slot]), width, rank, x.dtype)
        return SlotChange(a, b, float(table.scales[matrix, slot]))

    for matrix in range(len(table.a)):
        by_slot = [change(matrix, slot) for slot in range(table.a.shape[1])]
        if any(one is not None for one in by_slot):
            begin, width = int(table.begins[matrix]), int(table.widths[matrix])
            adapted_linear(x, out[:, begin : begin + width], slots, [by_slot])
    return out


def _matrix_at(address: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    memory = (ctypes.c_char * (rows * columns * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(rows, columns)


def _packed_linear(
    x: torch.Tensor,
    weight: packed_matrix.PackedMatrix,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    return out.copy_(packed_matrix.packed_linear(x, weight, bias))


def _scaled_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight: scaled_matrix.ScaledMatrix,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    if x_scales is None:
        return out.copy_(scaled_matrix.unrounded_linear(x, weight, bias))
    return out.copy_(scaled_matrix.product_of_rounded(x, x_scales, weight, bias))


def _norm_round(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    residual: torch.Tensor | None = None,
    **how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if residual is not None:
        residual += x
        x = residual
    return scaled_matrix.round_rows(rms_norm.rms_norm(x, weight, eps), dtype, **how)


def _swiglu_round(
    gate_up: torch.Tensor, dtype: torch.dtype, *, activation: Activation, limit: float | None, **how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return scaled_matrix.round_rows(gated(activation, gate_up, limit), dtype, **how)


REFERENCE_OPERATORS = Operators(
    paged_decode=_paged_decode,
    paged_prefill=_paged_prefill,
    rms_norm=_rms_norm,
    add_rms_norm=_add_rms_norm,
    sum_parts=_sum_parts,
    sum_parts_rms_norm=_sum_parts_rms_norm,
    rotary_write=_rotary_write,
    skinny_linear=_skinny_linear,
    skinny_swiglu=_skinny_swiglu,
    swiglu=_swiglu,
    packed_linear=_packed_linear,
    round_rows=scaled_matrix.round_rows,
    norm_round=_norm_round,
    swiglu_round=_swiglu_round,
    scaled_linear=_scaled_linear,
    unpack=lambda weight, out: out.copy_(packed_matrix.dequantise(weight)),
    router_logits=_router_logits,
    route_experts=_route_experts,
    order_rows=_order_rows,
    expert_swiglu=_expert_swiglu,
    expert_linear=_expert_linear,
    packed_expert_swiglu=_packed_expert_swiglu,
    packed_expert_linear=_packed_expert_linear,
    sum_experts=_sum_experts,
    adapted_linear=_adapted_linear,
    short_conv=causal_conv.short_conv,
    causal_conv=causal_conv.causal_conv,
    delta_rule=recurrent_meanings.delta,
    state_space=recurrent_meanings.space,
    selective_scan=recurrent_meanings.scan,
    begin_states=state_pages.begin_states,
    end_states=state_pages.end_states,
    sample=_sample,
    make_scratch=lambda rows, heads, head_dim, max_tokens, device: (rows, max_tokens),
    make_routed=_make_routed,
    make_sample_scratch=lambda rows, vocab, device: None,
)
