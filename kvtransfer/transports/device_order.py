"""When has a GPU done what was queued? Host code runs ahead of it, and promises must not.

The engine queues a worker's steps on the default stream of its device; so an event recorded there, after a
step's call returned, comes when what that step writes is written. On the CPU the call itself has written it.
"""

from __future__ import annotations

import asyncio

import torch

from diptych.engine.kv.kv_memory import KVMemory

CPU = torch.device("cpu")


def gpu_uuid(device: torch.device) -> str:
    """What names this GPU on every machine; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def queued_work(memory: KVMemory) -> torch.cuda.Event | None:
    """What comes when all steps queued until now have written to `memory`; None: they have."""
    device = memory.data.device
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.default_stream(device))
    return event


async def until_written(memory: KVMemory) -> None:
    """Wait for that, without keeping the event loop."""
    event = queued_work(memory)
    if event is not None:
        await asyncio.to_thread(event.synchronize)
