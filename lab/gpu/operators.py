"""The operators between the matrix products, at the shapes of an 8B model: each beside the copy bandwidth,
for none of them does more than move bytes; block copies beside one contiguous copy; sampling in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from lab.gpu.ceilings import COPY
from lab.gpu.paged_case import BLOCK_SIZE, HEAD_DIM, HEADS, KV_HEADS
from lab.gpu.section import Context, Figure, device_of, figure
from lab.gpu.timing import Work, measure

SECTION = "operators"
_HIDDEN, _INTERMEDIATE, _VOCAB, _LAYERS = 4096, 14_336, 128_256, 32
_TOKENS = (64, 8192)
"""A decode step's and a chunk's."""
_COPIED_BLOCKS = 512
_COPY_TARGET = 0.85
_FRAGMENTATION_TARGET = 1.05
_BF16 = torch.bfloat16


@dataclass(frozen=True)
class _Moved:
    """An operator, and the fewest bytes that it can read and write."""

    name: str
    work: Work
    nbytes: int


def operators(context: Context) -> Iterator[Figure]:
    """Figures of norms, gate, rotary with the KV write, sampling, and block copies."""
    device = device_of(context)
    for tokens in context.pick(_TOKENS, _TOKENS[1:], (3,)):
        context.say(f"operators on {tokens} tokens")
        yield from _memory_bound(context, [*_elementwise(tokens, device), _rotary(tokens, device)])
    for rows in context.pick((1, 64), (64,), (2,)):
        yield from _sampling(context, rows, device)
    yield from _copies(context, device)


def _memory_bound(context: Context, moved: list[_Moved]) -> Iterator[Figure]:
    copy = context.needs(COPY)
    times = measure(context, {one.name: one.work for one in moved})
    for one in moved:
        rate = one.nbytes / times[one.name].median_s
        yield figure(
            SECTION, one.name, times[one.name].median_s * 1e6, "µs", against="copy bandwidth",
            ratio=rate / copy, note=f"{rate / 1e12:.2f} TB/s, {times[one.name].note()}",
        )  # fmt: skip


def _elementwise(tokens: int, device: torch.device) -> Iterator[_Moved]:
    from kernels.gpu.rms_norm import add_rms_norm, rms_norm
    from kernels.gpu.swiglu import swiglu

    x, residual, out = (torch.randn(tokens, _HIDDEN, device=device).to(_BF16) for _ in range(3))
    weight = torch.randn(_HIDDEN, device=device).to(_BF16)
    gate_up = torch.randn(tokens, 2 * _INTERMEDIATE, device=device).to(_BF16)
    inner = torch.empty(tokens, _INTERMEDIATE, device=device, dtype=_BF16)
    row = tokens * _HIDDEN * 2
    yield _Moved(f"rms_norm, {tokens} tokens", lambda: rms_norm(x, weight, 1e-5, out=out), 2 * row)
    yield _Moved(
        f"add_rms_norm, {tokens} tokens", lambda: add_rms_norm(x, residual, weight, 1e-5, out=out), 4 * row
    )
    yield _Moved(f"swiglu, {tokens} tokens", lambda: swiglu(gate_up, out=inner), tokens * _INTERMEDIATE * 6)


def _rotary(tokens: int, device: torch.device) -> _Moved:
    from kernels.gpu.rotary_write import rotary_write

    width = HEADS + 2 * KV_HEADS
    qkv = torch.randn(tokens, width, HEAD_DIM, device=device).to(_BF16)
    cos, sin = (torch.rand(tokens, HEAD_DIM // 2, device=device).to(_BF16) for _ in range(2))
    pages = -(-tokens // BLOCK_SIZE)
    blocks = torch.zeros(pages, 1, 2, KV_HEADS, HEAD_DIM * BLOCK_SIZE, device=device, dtype=_BF16)
    at = torch.arange(tokens, device=device)
    ids, lanes = torch.randperm(pages, device=device)[at // BLOCK_SIZE], (at % BLOCK_SIZE).int()
    out = torch.empty(tokens, HEADS, HEAD_DIM, device=device, dtype=_BF16)
    norm = torch.rand(HEAD_DIM, device=device).to(_BF16)
    return _Moved(
        f"q/k norm, rotary, KV write, {tokens} tokens",
        lambda: rotary_write(
            qkv, cos, sin, blocks, 0, ids, lanes,
            heads=HEADS, kv_heads=KV_HEADS, q_norm=norm, k_norm=norm, eps=1e-6, out=out,
        ),
        tokens * HEAD_DIM * 2 * (2 * width + 1),
    )  # fmt: skip


def _sampling(context: Context, rows: int, device: torch.device) -> Iterator[Figure]:
    from kernels.gpu.sample import make_scratch, sample

    context.say(f"sampling of {rows} rows")
    # As peaked as a model's: a few hundred tokens have nearly all of the mass.
    vocab = context.pick(_VOCAB, _VOCAB, 300)
    logits = torch.randn(rows, vocab, device=device) * 3
    scratch, out = make_scratch(rows, vocab, device), torch.empty(rows, dtype=torch.int64, device=device)
    seeds, positions = torch.arange(rows, device=device), torch.arange(rows, device=device)

    def drawn(temperature: float, top_k: int, top_p: float, min_p: float) -> Callable[[], torch.Tensor]:
        heat, least = (torch.full((rows,), x, device=device) for x in (temperature, min_p))
        mass = torch.full((rows,), top_p, dtype=torch.float64, device=device)
        count = torch.full((rows,), top_k, dtype=torch.int32, device=device)
        return lambda: sample(logits, heat, count, mass, least, seeds, positions, scratch=scratch, out=out)

    works: dict[str, Work] = {
        "greedy": drawn(0.0, 0, 1.0, 0.0),
        "temperature": drawn(0.8, 0, 1.0, 0.0),
        "top-k 50": drawn(0.8, 50, 1.0, 0.0),
        "top-p 0.9": drawn(0.8, 0, 0.9, 0.0),
        "top-k 50, top-p 0.9, min-p 0.05": drawn(0.8, 50, 0.9, 0.05),
    }
    times = measure(context, works)
    for name, time in times.items():
        yield figure(SECTION, f"sample, {rows} rows, {name}", time.median_s * 1e6, "µs", note=time.note())


def _copies(context: Context, device: torch.device) -> Iterator[Figure]:
    from kernels.copy_blocks import bind
    from kernels.gpu.copy_blocks import copy_blocks

    context.say("block copies")
    count = context.pick(_COPIED_BLOCKS, _COPIED_BLOCKS, 2)
    shape = (2 * count, _LAYERS, 2, KV_HEADS, HEAD_DIM * BLOCK_SIZE)
    source, target = (torch.empty(shape, device=device, dtype=_BF16).normal_() for _ in range(2))
    straight = torch.arange(count, device=device)
    scattered = [torch.randperm(2 * count, device=device)[:count] for _ in range(2)]
    digests, binding = torch.empty_like(straight), bind(1, 2, straight)
    works: dict[str, Work] = {
        "contiguous": lambda: target[:count].copy_(source[:count]),
        "in order": lambda: copy_blocks(source, straight, target, straight),
        "scattered": lambda: copy_blocks(source, scattered[0], target, scattered[1]),
        "scattered, with digests": lambda: copy_blocks(
            source, scattered[0], target, scattered[1], digests=digests, binding=binding
        ),
    }
    times = measure(context, works, graph=False)  # as in ceilings.py
    whole = times["contiguous"].median_s
    for name in ("in order", "scattered", "scattered, with digests"):
        yield figure(
            SECTION, f"copy of {count} blocks, {name}", times[name].median_s * 1e6, "µs",
            against="contiguous copy", ratio=whole / times[name].median_s, at_least=_COPY_TARGET,
            note=times[name].note(),
        )  # fmt: skip
    spread = times["scattered"].median_s / times["in order"].median_s
    yield figure(SECTION, "copy, scattered over in order", spread, "x", at_most=_FRAGMENTATION_TARGET)
