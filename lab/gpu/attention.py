"""The attention kernels at the shapes of an 8B model: decode beside the copy bandwidth, prefill beside the
GEMM rate, both beside their peers in the same rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from lab.gpu.attention_peers import Peer, decode_peers, prefill_peers
from lab.gpu.ceilings import COPY, GEMM
from lab.gpu.folded_attention import folded_figures
from lab.gpu.fp8_attention import fp8_prefill_figure
from lab.gpu.paged_case import HEAD_DIM, HEADS, KV_HEADS, PagedCase, paged_case, random_query
from lab.gpu.section import Context, Figure, Unmeasured, device_of, figure
from lab.gpu.timing import Timing, Work, measure

SECTION = "attention"
_DECODE = ((32, 4096, 0.85), (32, 8192, 0.85), (32, 16_384, 0.85), (32, 32_768, 0.85), (1, 131_072, 0.70))
"""Rows, context of each, the share of the copy bandwidth that is wanted."""
_FP8 = (32, 16_384)
"""Rows and context: no target and no peer, for the bytes that FP8 saves."""
_DRY_DECODE = ((2, 40, 0.85),)
_PREFILL = (8192, 32_768)
_PREFILL_TARGET = 0.55
_FLASHINFER_TARGET = 1.0
_LARGEST_ERROR = 0.02
"""Distance between two bfloat16 kernels: norm of the difference over the norm."""


def attention(context: Context) -> Iterator[Figure]:
    """Figures of decode at batch 32 (4K to 32K) and batch 1 (128K), and of prefill at 8K and 32K."""
    device = device_of(context)
    for rows, tokens, target in context.pick(_DECODE, _DECODE[:1] + _DECODE[-1:], _DRY_DECODE):
        yield from _decode_point(context, device, rows, tokens, target)
    yield from folded_figures(context, SECTION, device)
    yield _fp8_point(context, device, *context.pick(_FP8, _FP8, _DRY_DECODE[0][:2]))
    for tokens in context.pick(_PREFILL, _PREFILL[:1], (20,)):
        yield from _prefill_point(context, device, tokens)
        yield from fp8_prefill_figure(context, SECTION, device, tokens)


def _decode_point(
    context: Context, device: torch.device, rows: int, tokens: int, target: float
) -> Iterator[Figure]:
    from kernels.gpu.decode_splits import make_scratch
    from kernels.gpu.paged_decode import paged_decode

    name = f"decode, batch {rows}, context {tokens}"
    context.say(name)
    case, query = paged_case(rows, tokens, device), random_query(rows, device)
    lengths = torch.full((rows,), tokens, dtype=torch.int32, device=device)
    scratch = make_scratch(rows, HEADS, HEAD_DIM, tokens + 16, device)
    out = torch.empty_like(query)
    times = _beside_peers(
        context,
        name,
        lambda: paged_decode(query, case.blocks, 0, case.tables, lengths, scratch=scratch, out=out),
        _work_of_peers(context, decode_peers(), case, query),
    )
    rate = case.kv_bytes / times["ours"].median_s
    copy = context.needs(COPY)
    yield figure(
        SECTION, name, rate / 1e12, "TB/s", against="copy bandwidth", ratio=rate / copy, at_least=target,
        note=times["ours"].note(),
    )  # fmt: skip
    yield from _against_peers(name, times)


def _fp8_point(context: Context, device: torch.device, rows: int, tokens: int) -> Figure:
    from kernels.fp8_cache import DTYPE
    from kernels.gpu.decode_splits import make_scratch
    from kernels.gpu.paged_decode import paged_decode

    name = f"decode, batch {rows}, context {tokens}, FP8 keys and values"
    context.say(name)
    case, query = paged_case(rows, tokens, device), random_query(rows, device)
    blocks, scales = case.blocks.to(DTYPE), torch.full((1, 2, KV_HEADS), 0.5, device=device)
    lengths = torch.full((rows,), tokens, dtype=torch.int32, device=device)
    scratch, out = make_scratch(rows, HEADS, HEAD_DIM, tokens + 16, device), torch.empty_like(query)

    def work() -> torch.Tensor:
        return paged_decode(query, blocks, 0, case.tables, lengths, scales=scales, scratch=scratch, out=out)

    time = measure(context, {"ours": work})["ours"]
    rate = case.kv_bytes / 2 / time.median_s
    return figure(
        SECTION, name, rate / 1e12, "TB/s", against="copy bandwidth", ratio=rate / context.needs(COPY),
        note=f"{time.median_s * 1e6:.0f} µs, {time.note()}",
    )  # fmt: skip


def _prefill_point(context: Context, device: torch.device, tokens: int) -> Iterator[Figure]:
    from kernels.gpu.paged_prefill import paged_prefill

    name = f"prefill, {tokens} tokens"
    context.say(name)
    case, query = paged_case(1, tokens, device), random_query(tokens, device)
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    offsets = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    out = torch.empty_like(query)
    times = _beside_peers(
        context,
        name,
        lambda: paged_prefill(
            query, case.blocks, 0, case.tables, starts, offsets, max_tokens=tokens, out=out
        ),
        _work_of_peers(context, prefill_peers(), case, query),
    )
    # Two products of 2 * HEAD_DIM operations for each pair of positions that a causal mask leaves.
    rate = 2.0 * tokens * tokens * HEADS * HEAD_DIM / times["ours"].median_s
    yield figure(
        SECTION, name, rate / 1e12, "TFLOP/s", against="bf16 GEMM", ratio=rate / context.needs(GEMM),
        at_least=_PREFILL_TARGET, note=times["ours"].note(),
    )  # fmt: skip
    yield from _against_peers(name, times)


def _work_of_peers(
    context: Context, peers: Iterable[tuple[str, Peer]], case: PagedCase, query: torch.Tensor
) -> dict[str, Work]:
    """Return the peers that run here; each is run once. A peer that does not run is reported and left out."""
    works: dict[str, Work] = {}
    for name, peer in peers:
        if name == "FlexAttention" and (context.quick or context.dry):  # it compiles for long
            continue
        try:
            works[name] = peer(case, query)
            works[name]()
            context.synchronize()
        except ImportError:
            works.pop(name, None)
            context.say(f"{name} is not installed")
        except Exception as error:
            works.pop(name, None)
            context.say(f"{name} does not run: {type(error).__name__}: {str(error)[:200]}")
    return works


def _beside_peers(context: Context, name: str, ours: Work, peers: dict[str, Work]) -> dict[str, Timing]:
    """Times by name. Raises Unmeasured if ours says something else than a peer does: a fast wrong answer."""
    got = torch.as_tensor(ours()).float()
    for peer, work in peers.items():
        theirs = torch.as_tensor(work()).float()
        error = float((got - theirs).norm() / theirs.norm())
        if not error < _LARGEST_ERROR:
            raise Unmeasured(f"{name}: differs from {peer} by {error:.3g}")
    return measure(context, {"ours": ours, **peers}, rounds=20)


def _against_peers(name: str, times: dict[str, Timing]) -> Iterator[Figure]:
    for peer, theirs in times.items():
        if peer == "ours":
            continue
        yield figure(
            SECTION, f"{name}, beside {peer}", theirs.median_s * 1e6, "µs of the peer", against=peer,
            ratio=theirs.median_s / times["ours"].median_s,
            at_least=_FLASHINFER_TARGET if peer == "FlashInfer" and name.startswith("decode") else None,
            note=theirs.note(),
        )  # fmt: skip
