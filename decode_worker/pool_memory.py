"""The memory of a decode worker's blocks: as large as configured, or as its GPU has room for."""

from __future__ import annotations

import logging

from decode_worker.config import DecodeSettings
from diptych.engine.device import DeviceUnavailable, free_pool_bytes
from diptych.engine.kv.kv_memory import KVLayout
from diptych.runtime.settings import StartupError
from diptych.worker_process.loaded_engine import LoadedEngine
from diptych.worker_process.recurrent_model import held_state_bytes
from diptych.worker_process.step_memory import chunk_bytes
from kvtransfer.transports.pool_memory import PoolMemory, allocate_device_pool, allocate_pool
from kvtransfer.transports.prefault import total_memory

_log = logging.getLogger(__name__)


def make_pool(settings: DecodeSettings, engine: LoadedEngine) -> PoolMemory:
    """Allocate the blocks where the model computes, and prepare decode steps over them.

    On a GPU this is the last large allocation: weights and the buffers of decode steps are allocated before,
    so that the free memory is known. Raises DeviceUnavailable where no block fits, PoolTooLarge where more
    are configured than fit.
    """
    graphs = engine.runner.plan_decode(settings.max_batch, engine.layout.block_size, engine.layout.windows)
    engine.memory.took("decode steps")
    pool = _allocate(settings, engine, graphs + engine.runner.recorded_prompts)
    engine.memory.took("KV pool")
    blocks, context = pool.memory.num_blocks, engine.model.shape.max_context
    if blocks < engine.layout.prompt_blocks(context, 1):
        _log.warning(
            "the KV pool holds %d tokens, the model's context has %d: longer requests are refused",
            _tokens_in(engine.layout, blocks),
            context,
        )
    engine.runner.prepare_decode(pool.memory)
    if (plan := engine.memory.describe(settings.gpu_memory_utilization)) is not None:
        _log.info("%s", plan)
    if engine.group is not None:
        engine.group.measure_memory(engine.layout, blocks)
    return pool


def _tokens_in(layout: KVLayout, blocks: int) -> int:
    """Return the most tokens of one prompt that so many blocks hold."""
    size = layout.block_size
    kept = 0 if layout.windows is None else layout.windows.ring_blocks(blocks, 1, size)
    places = max(blocks - kept, blocks // layout.blocks_per_place)
    return places * size


class PoolTooLarge(StartupError):
    """A pool that is configured larger than the machine's memory."""


def _check_room(needed: int, there: int | None) -> None:
    """Check that the machine has `needed` bytes. Raises PoolTooLarge.

    Pages come with their first use: a pool that cannot be filled would end in the kernel's OOM killer.
    """
    if there is not None and needed > there:
        raise PoolTooLarge(
            f"--kv-memory-mib, --kv-blocks: a pool of {needed >> 20} MiB, and this machine has {there >> 20}"
        )


def _allocate(settings: DecodeSettings, engine: LoadedEngine, graphs: int) -> PoolMemory:
    layout, device = engine.layout, engine.model.device
    blocks = settings.num_blocks(layout.bytes_per_block)
    if device.type == "cpu":
        if settings.pool_chosen:
            _check_room(blocks * layout.bytes_per_block, total_memory())
        if engine.group is not None:
            return engine.group.memories.allocate_pool(layout, blocks)
        return allocate_pool(layout, blocks)
    chunks, states = _chunk_bytes(settings, engine), _state_bytes(settings, engine)
    engine.memory.plan_graphs(graphs)
    engine.memory.plan("chunks of prompts", chunks)
    engine.memory.plan("recurrent states of a step", states)
    if not settings.pool_chosen:
        blocks = _blocks_with_room(settings, engine, graphs, chunks + states)
    gib = blocks * layout.bytes_per_block / 2**30
    if engine.group is not None:
        _log.info("the KV pool has %d blocks, %.1f GiB on the GPUs of all ranks", blocks, gib)
        return engine.group.memories.allocate_pool(layout, blocks)
    _log.info("the KV pool on %s has %d blocks, %.1f GiB", device, blocks, gib)
    return allocate_device_pool(layout, blocks, device)


def _blocks_with_room(settings: DecodeSettings, engine: LoadedEngine, graphs: int, temporaries: int) -> int:
    """Return the blocks that the GPU has room for, or the GPUs of all ranks. Raises DeviceUnavailable."""
    utilization, layout, device = settings.gpu_memory_utilization, engine.layout, engine.model.device
    if engine.group is not None:
        blocks = engine.group.memories.count_blocks(layout, utilization, graphs, temporaries)
        why = "the GPU of a rank has no room for its share"
    else:
        room = free_pool_bytes(device, utilization, graphs, temporaries)
        blocks = room // layout.bytes_per_block
        why = f"{-room / 2**20:.0f} MiB are missing"
    if blocks < 1:
        raise DeviceUnavailable(
            f"{device} has no room for KV blocks at --gpu-memory-utilization {utilization}: {why}"
        )
    return blocks


def _chunk_bytes(settings: DecodeSettings, engine: LoadedEngine) -> int:
    """Return the bytes that steps with chunks, which are not recorded, take when they come: those of drafts,
    which make chunks of a step's rows, and those of prompts that are computed here.
    """
    prompts = _prompt_tokens(settings, engine)
    tokens = max(prompts, settings.max_batch * (1 + settings.draft_tokens) if settings.draft_tokens else 0)
    return chunk_bytes(engine, tokens) if tokens else 0


def _prompt_tokens(settings: DecodeSettings, engine: LoadedEngine) -> int:
    """Return the most tokens of prompts that a step computes here."""
    bounds = settings.local_bounds(engine.model.device.type)
    return bounds.idle_chunk if bounds.short or bounds.fallback else 0


def _state_bytes(settings: DecodeSettings, engine: LoadedEngine) -> int:
    """Return the bytes of recurrent states that the largest step holds beside its blocks."""
    rows, tokens = settings.max_batch, _prompt_tokens(settings, engine)
    # A row with drafts may settle tokens of two places.
    kept = rows + (min(rows, settings.step_tokens) if settings.draft_tokens else 0)
    return held_state_bytes(engine.model, engine.layout, rows=kept, prompts=rows, tokens=tokens)
