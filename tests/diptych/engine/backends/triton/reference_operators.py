"""The operators of a GPU step as their torch meanings, for tests of whole steps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from diptych.engine.backends.triton.operators import Operators
from diptych.engine.sampling.random import sample_token
from diptych.engine.sampling.sample_row import SampleRow, SamplingParams
from kernels import paged_attention, rms_norm, rotary, swiglu
from kernels import paged_decode as decode

UNSIGNED = 1 << 64


def _paged_decode(
    query: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    window: int | None = None,
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
    return out.copy_(decode.paged_decode(query, blocks, layer, tables.long(), seen.long(), window, scales))


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
    scales: torch.Tensor | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    bounds = offsets.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(query)
    assert max_tokens == max(end - begin for begin, end in pairwise(bounds))
    assert context_tokens == int(starts.sum()) + len(query)
    for row, (begin, end) in enumerate(pairwise(bounds)):
        out[begin:end] = paged_attention.paged_attention(
            query[begin:end], blocks, layer, tables[row].long(), int(starts[row]), window, scales
        )
    return out


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(rms_norm.rms_norm(x, weight, eps))


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor
) -> torch.Tensor:
    residual += x
    return out.copy_(rms_norm.rms_norm(residual, weight, eps))


def _rotary_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    blocks: torch.Tensor,
    layer: int,
    block_ids: torch.Tensor,
    lanes: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    scales: torch.Tensor | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm.rms_norm(q, q_norm, eps), rms_norm.rms_norm(k, k_norm, eps)
    written = block_ids >= 0
    decode.write_kv_rows(
        blocks,
        layer,
        block_ids[written],
        lanes[written].long(),
        rotary.rotary(k.float(), cos, sin)[written],
        v[written],
        scales,
    )
    return out.copy_(rotary.rotary(q.float(), cos, sin))


def _skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor
) -> torch.Tensor:
    assert len(x) <= 16
    assert x.dtype.itemsize == 2
    wide = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return out.copy_(wide)


def _skinny_swiglu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor
) -> torch.Tensor:
    return out.copy_(swiglu.swiglu(_skinny_linear(x, weight, bias, out=x.new_empty(len(x), len(weight)))))


def _swiglu(gate_up: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(swiglu.swiglu(gate_up))


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


REFERENCE_OPERATORS = Operators(
    paged_decode=_paged_decode,
    paged_prefill=_paged_prefill,
    rms_norm=_rms_norm,
    add_rms_norm=_add_rms_norm,
    rotary_write=_rotary_write,
    skinny_linear=_skinny_linear,
    skinny_swiglu=_skinny_swiglu,
    swiglu=_swiglu,
    sample=_sample,
    make_scratch=lambda rows, heads, head_dim, max_tokens, device: (rows, max_tokens),
    make_sample_scratch=lambda rows, vocab, device: None,
)
