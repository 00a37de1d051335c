"""The peers of the attention kernels: torch's SDPA, FlexAttention, and FlashInfer where it is installed.

Each gets the layout that it likes best, made outside the measured time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from lab.gpu.paged_case import BLOCK_SIZE, HEAD_DIM, HEADS, KV_HEADS, PagedCase
from lab.gpu.timing import Work

Peer = Callable[[PagedCase, torch.Tensor], Work]
"""Given the case and the query `[rows or tokens, HEADS, HEAD_DIM]`, the work; it returns the mixed values."""

_WORKSPACE = 256 << 20


def decode_peers() -> Iterator[tuple[str, Peer]]:
    """Return the peers of decode attention by name."""
    yield "SDPA", _sdpa_decode
    yield "FlexAttention", _flex_decode
    yield "FlashInfer", _flashinfer_decode


def prefill_peers() -> Iterator[tuple[str, Peer]]:
    """Return the peers of causal prefill attention of one whole prompt by name."""
    yield "SDPA", _sdpa_prefill
    yield "FlexAttention", _flex_prefill
    yield "FlashInfer", _flashinfer_prefill


def _sdpa_decode(case: PagedCase, query: torch.Tensor) -> Work:
    keys, values = case.dense()
    q = query[:, :, None]
    return lambda: functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)[:, :, 0]


def _sdpa_prefill(case: PagedCase, query: torch.Tensor) -> Work:
    keys, values = case.dense()
    q = query.transpose(0, 1)[None]
    return lambda: functional.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)[
        0
    ].transpose(0, 1)


def _flex() -> tuple[Any, Any]:
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    return torch.compile(flex.flex_attention), flex.create_block_mask


def _flex_decode(case: PagedCase, query: torch.Tensor) -> Work:
    attention, _ = _flex()
    keys, values = case.dense()
    q = query[:, :, None]
    return lambda: attention(q, keys, values, enable_gqa=True)[:, :, 0]


def _flex_prefill(case: PagedCase, query: torch.Tensor) -> Work:
    attention, create_block_mask = _flex()
    keys, values = case.dense()
    mask = create_block_mask(
        lambda _b, _h, at, seen: at >= seen, None, None, case.tokens, case.tokens, device=query.device
    )
    q = query.transpose(0, 1)[None]
    return lambda: attention(q, keys, values, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def _pages(case: PagedCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashInfer's description of a table: where each row's pages begin, the pages, tokens in the last."""
    pages = case.tables.shape[1]
    device = case.tables.device
    begins = torch.arange(case.rows + 1, dtype=torch.int32, device=device) * pages
    last = case.tokens - (pages - 1) * BLOCK_SIZE
    return begins, case.tables.flatten(), torch.full((case.rows,), last, dtype=torch.int32, device=device)


def _flashinfer_decode(case: PagedCase, query: torch.Tensor) -> Work:
    flashinfer = importlib.import_module("flashinfer")
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=query.device)
    # With tensor cores it is faster at four query heads a KV head.
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        *_pages(case),
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    cache = case.by_token()
    return lambda: wrapper.run(query, cache)


def _flashinfer_prefill(case: PagedCase, query: torch.Tensor) -> Work:
    flashinfer = importlib.import_module("flashinfer")
    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    offsets = torch.tensor([0, case.tokens], dtype=torch.int32, device=query.device)
    wrapper.plan(
        offsets,
        *_pages(case),
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        causal=True,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    cache = case.by_token()
    return lambda: wrapper.run(query, cache)
