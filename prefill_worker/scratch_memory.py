"""The size of scratch, decided at the start: the own blocks of a prefill worker where it copies.

They hold at least one prompt of the whole context, so that the longest legal prompt always fits. A worker
without room for that does not start, or, where it may compute in a decode worker's memory, offers no copies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from diptych.engine.device import free_pool_bytes
from diptych.engine.kv.kv_memory import KVLayout
from diptych.runtime.settings import StartupError
from kvtransfer.transports.prefault import available_memory, total_memory
from kvtransfer.transports.registry import IN_PLACE

CONTEXTS = 2
"""Contexts that scratch holds where memory is plenty: one prompt is pushed while the next is computed."""
SHARE = 0.5
"""Most of the free memory that scratch takes beyond one context: other programs start beside this one."""
_DEVICE_SHARE = 0.9
_log = logging.getLogger(__name__)


class ScratchDoesNotFit(StartupError):
    """Scratch that is smaller than one prompt may be, or larger than memory."""


@dataclass(frozen=True, slots=True)
class ScratchPlan:
    """The blocks of scratch, and the transports that a worker with them may use."""

    blocks: int
    """0 where the worker never copies."""
    transports: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the machine, its container or the GPU; None where they are not known."""

    free: int | None
    total: int | None

    @classmethod
    def of(
        cls,
        device: torch.device,
        graphs: int = 0,
        steps: int = 0,
        on_ranks: Callable[[float, int, int], int] | None = None,
    ) -> Memory:
        """Return the memory of `device` now; on a GPU less that of so many graphs, and bytes of steps.

        Where ranks have GPUs of their own, `on_ranks` returns what all of them have for whole blocks.
        """
        if device.type == "cpu":
            return cls(available_memory(), total_memory())
        if on_ranks is not None:
            room = max(0, on_ranks(_DEVICE_SHARE, graphs, steps))
        else:
            room = max(0, free_pool_bytes(device, _DEVICE_SHARE, graphs, steps))
        return cls(room, room)


def plan_scratch(
    configured: int,
    transports: Sequence[str],
    layout: KVLayout,
    max_context: int,
    memory: Memory,
    chunk: int = 0,
) -> ScratchPlan:
    """Return the plan of scratch for prompts of up to `max_context` tokens.

    Args:
        configured: --scratch-blocks; 0 takes what memory has room for.
        chunk: most tokens of a prompt that are computed at once.

    Raises ScratchDoesNotFit.
    """
    in_place = tuple(t for t in transports if t in IN_PLACE)
    if len(in_place) == len(transports):
        return ScratchPlan(0, in_place)
    context = layout.prompt_blocks(max_context, chunk)
    if configured:
        _check_configured(configured, context, layout, max_context, memory)
        return ScratchPlan(configured, tuple(transports))
    size = layout.bytes_per_block
    if memory.free is None:
        return ScratchPlan(CONTEXTS * context, tuple(transports))
    if context * size <= memory.free:
        roomy = int(SHARE * memory.free) // size
        return ScratchPlan(max(context, min(CONTEXTS * context, roomy)), tuple(transports))
    why = (
        f"one prompt of {max_context} tokens takes {_mib(context * size)} MiB in the blocks that copies "
        f"start from, and {_mib(memory.free)} MiB are free: lower --max-model-len"
    )
    if not in_place:
        raise ScratchDoesNotFit(f"--transport {','.join(transports)}: {why}")
    _log.warning("this worker offers no transport that copies: %s", why)
    return ScratchPlan(0, in_place)


def _check_configured(blocks: int, context: int, layout: KVLayout, max_context: int, memory: Memory) -> None:
    if blocks < context:
        raise ScratchDoesNotFit(
            f"--scratch-blocks {blocks}: they hold {blocks * layout.block_size} tokens, and a prompt may "
            f"have {max_context} (--max-model-len): {context} blocks are the least"
        )
    needed = blocks * layout.bytes_per_block
    if memory.total is not None and needed > memory.total:
        raise ScratchDoesNotFit(
            f"--scratch-blocks {blocks}: they take {_mib(needed)} MiB, and there are {_mib(memory.total)}"
        )


def _mib(size: int) -> int:
    return -(-size >> 20)
