"""The handoff between blocks on a GPU: the copy kernel beside a plain device copy, and the tax of the rest.

Blocks have the shape of an 8B model's (32 layers, 8 KV heads x 128, 16 tokens, bf16: 2 MiB over all layers).
The kernel runs within one pool pair of this process. The tax is that of two processes with the real ends of
the handoff (lab/handoff.py): all that is beyond the bytes over this machine's copy bandwidth.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence

import torch

from diptych.bench.figures import percentile
from diptych.engine.kv.kv_memory import KVMemory
from kvtransfer.transports import cuda_ipc, process_group, shared_memory
from kvtransfer.transports.registry import IN_PLACE
from kvtransfer.transports.shared_memory import ON_GPU
from lab.gpu.ceilings import COPY
from lab.gpu.section import Context, Figure, device_of, figure
from lab.gpu.timing import Timing, measure
from lab.handoff import SHAPES
from lab.handoff import measure as measure_handoff

SECTION = "handoff"
_LAYOUT = SHAPES["8b"]
_CHUNK_TOKENS = 8192
_TAX_TOKENS = (2048, 8192)
_ON_GPU, _ON_CPU = (ON_GPU, cuda_ipc.NAME), (shared_memory.NAME, process_group.GLOO)
"""Transports: in place, then copied."""
_AT_LEAST = 0.85
_SPREAD_AT_MOST = 0.05
_TAX_MS_AT_MOST = 3.0


def handoff(context: Context) -> Iterator[Figure]:
    """Needs the ceilings."""
    yield from _tax(context, device_of(context))


def block_copies(context: Context) -> Iterator[Figure]:
    """Yield the kernels' rates beside that of a contiguous copy."""
    yield from _kernel(context, device_of(context))


def _tables(count: int, pool: int) -> dict[str, list[int]]:
    """Yield places of one chunk's blocks, from a fresh pool to one that has been used for long."""
    rng = random.Random(7)
    anywhere = rng.sample(range(pool), count)
    runs = [list(range(start, start + 8)) for start in range(0, pool - 7, 8)]
    rng.shuffle(runs)
    return {
        "in order": list(range(count)),
        "every second": list(range(0, 2 * count, 2)),
        "runs of 8": [block for run in runs for block in run][:count],
        "scattered": anywhere,
    }


def _kernel(context: Context, device: torch.device) -> Iterator[Figure]:
    context.say("copy of scattered blocks")
    count = _LAYOUT.blocks_for(context.pick(_CHUNK_TOKENS, _CHUNK_TOKENS // 4, 64))
    source, target = (KVMemory.on_device(_LAYOUT, 2 * count, device) for _ in range(2))
    source.data.copy_(torch.randn(_LAYOUT.block_shape, device=device))
    size = count * _LAYOUT.bytes_per_block
    flat_source, flat_target = (memory.data.view(-1).view(torch.uint8)[:size] for memory in (source, target))
    works: dict[str, Callable[[], object]] = {"contiguous": lambda: flat_target.copy_(flat_source)}
    tables = _tables(count, 2 * count)
    for name, table in tables.items():
        works[name] = _copy(source, target, table, digest=False)
    works["scattered, digests"] = _copy(source, target, tables["scattered"], digest=True)
    times = measure(context, works, graph=False)  # as in ceilings.py
    yield from _against_contiguous(times, size, [*tables, "scattered, digests"])
    yield _conversion(context, source, target, tables["scattered"], times["contiguous"])
    yield _two_to_one(context, source, target, tables["scattered"], times["contiguous"])
    medians = [times[name].median_s for name in tables]
    yield figure(
        SECTION,
        "spread with fragmentation",
        max(medians) / min(medians) - 1,
        "of the fastest",
        at_most=_SPREAD_AT_MOST,
        note=", ".join(f"{name} {times[name].median_s * 1e3:.3f} ms" for name in tables),
    )


def _against_contiguous(times: dict[str, Timing], size: int, names: Sequence[str]) -> Iterator[Figure]:
    plain = times["contiguous"].median_s
    for name in names:
        yield figure(
            SECTION,
            f"copy_blocks, {name}",
            2 * size / times[name].median_s / 1e12,
            "TB/s",
            against="contiguous device copy",
            ratio=plain / times[name].median_s,
            at_least=_AT_LEAST,
            note=times[name].note(),
        )


def _conversion(
    context: Context, source: KVMemory, target: KVMemory, table: list[int], plain: Timing
) -> Figure:
    """Half of the heads into blocks of four times the size, as for a rank of another degree."""
    from kernels.convert_blocks import HeadRange, block_major
    from kernels.gpu.convert_blocks import convert_blocks  # needs Triton

    layers, heads, head_dim, size = (
        _LAYOUT.num_layers, _LAYOUT.num_kv_heads // 2, _LAYOUT.head_dim, 4 * _LAYOUT.block_size
    )  # fmt: skip
    blocks = len(table) // 4
    other = target.data.view(-1)[: blocks * layers * 2 * heads * head_dim * size]
    views = (
        block_major(source.data, head_dim),
        block_major(other.view(blocks, layers, 2, heads, -1), head_dim),
    )
    ids = torch.tensor(table, device=source.device)
    places = torch.randperm(blocks, device=source.device)
    digests, binding = torch.zeros_like(places), torch.ones_like(places)
    half, tokens = HeadRange(heads, 0, heads), blocks * size
    time = measure(
        context,
        {
            "convert": lambda: convert_blocks(
                views[0], ids, views[1], places, half, tokens, digests=digests, binding=binding
            )
        },
    )["convert"]
    moved = other.nbytes
    return figure(
        SECTION, "convert_blocks, half of the heads, blocks of 64, digests",
        2 * moved / time.median_s / 1e12, "TB/s", against="contiguous device copy",
        ratio=plain.median_s * (moved / (len(table) * _LAYOUT.bytes_per_block)) / time.median_s,
        at_least=_AT_LEAST,
        note=time.note(),
    )  # fmt: skip


def _two_to_one(
    context: Context, source: KVMemory, target: KVMemory, table: list[int], plain: Timing
) -> Figure:
    """Convert the blocks of the second of two ranks into the upper half of whole ones."""
    from kernels.convert_blocks import block_major, common_heads
    from kernels.gpu.convert_blocks import convert_blocks  # needs Triton

    layout = _LAYOUT
    heads, head_dim = layout.num_kv_heads, layout.head_dim
    shares = source.data.view(-1)[: source.data.numel() // 2]
    share = block_major(shares.view(source.num_blocks, layout.num_layers, 2, heads // 2, -1), head_dim)
    whole = block_major(target.data, head_dim)
    common = common_heads(heads, (1, 2), (0, 1))
    assert common is not None, "one process has all heads"
    ids = torch.tensor(table, device=source.device)
    places = ids[torch.randperm(len(table), device=source.device)]
    digests, binding = torch.zeros_like(places), torch.ones_like(places)
    tokens = len(table) * layout.block_size
    time = measure(
        context,
        {
            "convert": lambda: convert_blocks(
                share, ids, whole, places, common, tokens, digests=digests, binding=binding
            )
        },
    )["convert"]
    moved = len(table) * layout.bytes_per_block // 2
    return figure(
        SECTION, "convert_blocks, a rank of two to one process, digests",
        2 * moved / time.median_s / 1e12, "TB/s", against="contiguous device copy",
        ratio=plain.median_s / 2 / time.median_s,
        at_least=_AT_LEAST,
        note=time.note(),
    )  # fmt: skip


def _copy(source: KVMemory, target: KVMemory, table: list[int], *, digest: bool) -> Callable[[], object]:
    """Launch one copy, from and to the same places of two pools."""
    from kernels.gpu.copy_blocks import copy_blocks  # needs Triton

    device = source.data.device
    source_ids = torch.tensor(table, dtype=torch.int64, device=device)
    target_ids = source_ids.clone()
    digests = torch.zeros(len(table), dtype=torch.int64, device=device) if digest else None
    binding = torch.arange(len(table), dtype=torch.int64, device=device) if digest else None
    return lambda: copy_blocks(
        source.data, source_ids, target.data, target_ids, digests=digests, binding=binding
    )


def _tax(context: Context, device: torch.device) -> Iterator[Figure]:
    bandwidth = context.needs(COPY)
    context.say("handoff between two processes")
    rounds = context.pick(30, 5, 1)
    names = context.pick(_ON_GPU, _ON_GPU, _ON_CPU)
    lengths = context.pick(_TAX_TOKENS, _TAX_TOKENS, (40,))
    taken = asyncio.run(measure_handoff(names, lengths, rounds, shape="8b", device=str(device)))
    for (name, tokens), times in taken.items():
        size = _LAYOUT.blocks_for(tokens) * _LAYOUT.bytes_per_block
        least_ms = 0.0 if name in IN_PLACE else 2 * size / bandwidth * 1e3
        p50, p90 = percentile(times, 50), percentile(times, 90)
        yield figure(
            SECTION,
            f"tax of {name}, {tokens} tokens, p50",
            p50 - least_ms,
            "ms",
            at_most=_TAX_MS_AT_MOST,
            note=f"{p50:.2f} ms in all (p90 {p90:.2f}), {size / 2**20:.0f} MiB",
        )
