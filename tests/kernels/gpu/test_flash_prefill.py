"""FlashAttention-3 as prefill attention: our own kernel's numbers, from the package or from a stand-in.

The stand-in has the signature of the package's function and computes its meaning: arguments, packing and what
goes to our own kernel are tested without a card, the package's own numbers where it is installed on one.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels.gpu import flash_prefill as module
from kernels.gpu.flash_prefill import PACKAGE, flash_prefill, lacks_flash, takes
from kernels.gpu.paged_prefill import paged_prefill
from tests.kernels.gpu.paged import LAYER, TOLERANCE, Heads, Paged, error
from tests.kernels.gpu.test_paged_prefill import SMALL, case, expected

calls: list[dict[str, Any]] = []


def varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, seqused_q: None = None,
    seqused_k: torch.Tensor | None = None, softmax_scale: float = 1.0, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute causal attention aligned to the ends, over all keys up to the next tile's beginning."""
    calls.append({"window": window_size, "softcap": softcap})
    assert causal
    assert seqused_k is not None
    assert k.stride(-1) == v.stride(-1) == 1
    out = torch.full_like(q, torch.nan)  # rows of no sequence
    for number, used in enumerate(seqused_k.tolist()):
        begin, end = cu_seqlens_q[number : number + 2].tolist()
        first, last = cu_seqlens_k[number : number + 2].tolist()
        rows = end - begin
        assert rows <= max_seqlen_q
        assert used <= min(max_seqlen_k, last - first)
        if rows == 0:
            continue
        last = min(first + -(-used // 128) * 128 + 64, len(k))  # whole tiles are read, and more
        group = q.shape[1] // k.shape[1]
        keys, values = (one[first:last].repeat_interleave(group, 1).float() for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(used - rows, used)[:, None]
        seen = torch.arange(last - first)[None, :]
        hidden = seen > at if window_size[0] < 0 else (seen > at) | (seen < at - window_size[0])
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out, None


@pytest.fixture(autouse=True)
def package(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the package on a card, or skip; a stand-in elsewhere."""
    calls.clear()
    if device.type == "cuda":
        if (why := lacks_flash()) is not None:
            pytest.skip(why)
        return
    stand_in = ModuleType(PACKAGE)
    stand_in.flash_attn_varlen_func = varlen  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, PACKAGE, stand_in)


def run(
    query: torch.Tensor, memory: Paged, starts: list[int], chunks: list[int], **more: Any
) -> torch.Tensor:
    offsets = torch.tensor([0, *chunks]).cumsum(0).int().to(query.device)
    at = torch.tensor(starts, dtype=torch.int32, device=query.device)
    more = {"context_tokens": sum(starts) + sum(chunks), "max_tokens": max(chunks), **more}
    return flash_prefill(query, memory.blocks, LAYER, memory.tables, at, offsets, **more)


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("heads", [SMALL, Heads(6, 2, 80, 16)], ids=str)
def test_flash_prefill_equals_causal_attention(
    heads: Heads, window: int | None, device: torch.device
) -> None:
    torch.manual_seed(1)
    starts, chunks = [0, 3, 150, 9, 0], [1, 140, 5, 0, 33]
    query, memory = case(heads, starts, chunks, torch.bfloat16, device)
    got = run(query, memory, starts, chunks, window=window)
    right = expected(query, memory, starts, chunks, window)
    assert error(got, right) < TOLERANCE[torch.bfloat16]
    assert device.type == "cuda" or calls
    if window is not None:
        assert error(got, expected(query, memory, starts, chunks, None)) > 10 * TOLERANCE[torch.bfloat16]


def test_scale_and_cap_are_those_of_our_own_kernel(device: torch.device) -> None:
    torch.manual_seed(2)
    query, memory = case(SMALL, [7], [40], torch.bfloat16, device)
    rule: dict[str, Any] = {"scale": 0.4, "cap": 2.0, "max_tokens": 40, "context_tokens": 47}
    at, offsets = (torch.tensor(one, dtype=torch.int32, device=device) for one in ([7], [0, 40]))
    right = paged_prefill(query, memory.blocks, LAYER, memory.tables, at, offsets, **rule)
    assert error(run(query, memory, [7], [40], scale=0.4, cap=2.0), right) < TOLERANCE[torch.bfloat16]
    assert error(run(query, memory, [7], [40], scale=0.4), right) > 3 * TOLERANCE[torch.bfloat16]


def test_rows_of_no_sequence_are_left_alone(device: torch.device) -> None:
    query, memory = case(SMALL, [0], [20], torch.bfloat16, device)
    out = torch.full_like(query, 7.0)
    run(query, memory, [0], [12], out=out)
    assert (out[12:] == 7.0).all()
    assert not (out[:12] == 7.0).all()


def test_what_it_does_not_compute_goes_to_our_own_kernel(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, memory = case(SMALL, [0], [20], torch.bfloat16, device)
    assert takes(query, context_tokens=20)
    for name in ("sinks", "scales", "tree", "base"):
        assert not takes(query, context_tokens=20, **{name: query})
    assert not takes(query.float(), context_tokens=20)
    right = run(query, memory, [0], [20], sinks=torch.full((4,), -40.0, device=device))
    assert not calls
    assert error(run(query, memory, [0], [20]), right) < TOLERANCE[torch.bfloat16]
    monkeypatch.setattr(module, "PACKAGE", "no_such_package_of_attention")
    assert "no FlashAttention-3 here: No module named" in (lacks_flash() or "")
