"""Settings that do not go with a model whose layers keep a recurrent state, and what its states take."""

from __future__ import annotations

import logging

from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.kv.state_groups import LARGE_PAGE
from diptych.engine.kv.state_layout import page_bytes
from diptych.engine.loaded_model import Model
from diptych.engine.models.shape import ModelShape
from diptych.worker_process.config import LARGEST_GPU_BLOCK, ImpossibleSettings, WorkerSettings

log = logging.getLogger(__name__)

_LARGEST_CPU_BLOCK = 1024
"""Most tokens of a block on a CPU."""
_WORKING = 3
"""Copies of one layer's states that a step in torch has at once: those read, decayed ones, new ones."""


def check_recurrent_settings(settings: WorkerSettings, shape: ModelShape) -> None:
    """Raise ImpossibleSettings, naming the flags, for what is not computed with recurrent layers.

    Some kinds compute a prompt by pieces from where a step begins, so that bits depend on where it was cut.
    """
    if not shape.recurrent_layers:
        return
    refused = {
        settings.group_flags: settings.in_parts,
        "--kv-tier": settings.keeps_tiers,
        "--window-blocks off": settings.window_blocks == "off" and not settings.keeps_tiers,
        "--batch-invariant": settings.batch_invariant,
    }
    if (flag := next((name for name, holds in refused.items() if holds), None)) is not None:
        raise ImpossibleSettings(f"{flag} does not go with the recurrent layers of {shape.family}")


def check_heads_fit(shape: ModelShape, name: str) -> None:
    """Raise ImpossibleSettings for Medusa heads, EAGLE heads and layers that draft (`mtp`), named by
    --speculative-model, beside recurrent layers.
    """
    if shape.recurrent_layers:
        raise ImpossibleSettings(
            f"--speculative-model {name}: heads do not go with the recurrent layers of {shape.family}; draft "
            "models do, and --speculative-tokens alone"
        )


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


def held_state_bytes(
    model: Model, layout: KVLayout, *, rows: int = 0, prompts: int = 0, tokens: int = 0
) -> int:
    """Return the bytes of recurrent states that a step holds beside its blocks, at most.

    torch keeps all pages that a step writes until it is whole: one of each of `rows` that are decoded, and of
    a chunk one for each place that it reaches and whose page is its own. The larger one counts of such rows
    and of a step with `tokens` of `prompts` prompts. The Triton step changes pages where they lie.
    """
    if layout.states is None or layout.windows is None or model.backend_name != "torch":
        return 0
    size, prompts = layout.block_size, min(prompts, tokens)
    _, longest = layout.windows.ring_places(tokens, size)
    chunks = min(prompts * longest, 2 * prompts + tokens // size)
    largest = max(page_bytes([shapes]) for _, shapes in layout.states.layers)
    return max(rows, chunks) * layout.states.page_bytes + _WORKING * max(rows, prompts) * largest
