"""Settings that do not go with a model whose layers keep a recurrent state, and what its states take."""

from __future__ import annotations

import logging

from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.kv.state_groups import LARGE_PAGE
from diptych.engine.models.shape import ModelShape
from diptych.worker_process.config import LARGEST_GPU_BLOCK, ImpossibleSettings, WorkerSettings

log = logging.getLogger(__name__)

_LARGEST_CPU_BLOCK = 1024
"""Most tokens of a block on a CPU."""


def check_recurrent_settings(settings: WorkerSettings, shape: ModelShape) -> None:
    """Raise ImpossibleSettings, naming the flags, for what is not computed with recurrent layers.

    A state cannot be taken back: tokens that were drafted and refused would have to be.
    """
    if not shape.recurrent_layers:
        return
    refused = {
        settings.drafting_flags: bool(settings.drafting_flags),
        settings.group_flags: settings.in_parts,
        "--kv-tier": settings.keeps_tiers,
        "--window-blocks off": settings.window_blocks == "off" and not settings.keeps_tiers,
        f"--backend {settings.backend}": settings.backend == "triton",
    }
    if (flag := next((name for name, holds in refused.items() if holds), None)) is not None:
        raise ImpossibleSettings(f"{flag} does not go with the recurrent layers of {shape.family}")


def describe_states(layout: KVLayout, device_type: str = "cpu") -> str | None:
    """Return what a sequence's recurrent states take, in words; None without any.

    Larger blocks are named where pages take many, as far as `device_type` computes such.
    """
    if layout.states is None or layout.windows is None:
        return None
    pages, size = layout.windows.tables, layout.block_size
    words = (
        f"recurrent states of {len(layout.states.layers)} layers take {layout.states.page_bytes / 2**20:.2f} "
        f"MiB, {pages} block{'s' * (pages > 1)} of {size} tokens; a sequence keeps "
        f"{layout.windows.kept(size)} such pages"
    )
    largest = _LARGEST_CPU_BLOCK if device_type == "cpu" else LARGEST_GPU_BLOCK
    larger, blocks = size, pages
    while blocks >= LARGE_PAGE and larger < largest:
        larger = min(2 * larger, largest)
        blocks = -(-pages * size // larger)
    return words if larger == size else f"{words}. With --block-size {larger} they take about {blocks} blocks"
