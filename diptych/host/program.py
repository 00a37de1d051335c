"""Two workers in one process: loaded one after the other, served together, ended together.

    load decode's engine → a second one over its weights → both workers → both serve → one line announces them

A signal stops both, and each drains as it does alone. Where one ends first, by an order to drain or by a
fault, the other drains, too, and the process ends: a supervisor starts the pair, never a half of it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TypeVar

from decode_worker.config import DecodeSettings
from decode_worker.worker import DecodeWorker
from diptych.host.announcement import WorkerPipe, announce_both
from diptych.host.card import Card, over_same_weights, share_card
from diptych.host.config import HostedSettings
from diptych.host.flags import Sharing
from diptych.runtime.telemetry import Telemetry
from diptych.worker_process.engine_loader import load_engine
from diptych.worker_process.program import Worker, loaded_unless, startup_errors
from prefill_worker.config import PrefillSettings
from prefill_worker.worker import PrefillWorker

log = logging.getLogger(__name__)
Settings = TypeVar("Settings", PrefillSettings, DecodeSettings)


async def serve(settings: HostedSettings, stop: asyncio.Event) -> int:
    """Load the model once, serve with both workers until `stop`, drain; return the process's exit status.

    Raises StartupError.
    """
    pipes = [WorkerPipe("prefill"), WorkerPipe("decode")]
    prefill = _hosted(settings.prefill, pipes[0])
    decode = _hosted(settings.decode, pipes[1])
    telemetries = [Telemetry.start(f"diptych-{one.program}", one.worker_id) for one in (prefill, decode)]
    announcing: asyncio.Task[None] | None = None
    try:
        with startup_errors():
            card = share_card(Sharing.parse(settings.own.gpu_sharing), decode)
            workers = await _workers(prefill, decode, card, stop, telemetries)
        log.info("%s", card.how)
        announcing = asyncio.create_task(announce_both(pipes, settings.own.ready_fd), name="announce")
        return await _serve_both(workers, stop)
    finally:
        if announcing is not None:
            announcing.cancel()
        for telemetry in telemetries:
            telemetry.stop()


def _hosted(settings: Settings, pipe: WorkerPipe) -> Settings:
    """Return the settings of a worker that does not have its process for itself."""
    return settings.model_copy(
        update={"hosted": True, "ready_fd": pipe.ready_fd, "death_fd": None, "role_changes": "none"}
    )


async def _workers(
    prefill: PrefillSettings,
    decode: DecodeSettings,
    card: Card,
    stop: asyncio.Event,
    telemetries: list[Telemetry],
) -> list[Worker]:
    """Load both engines over the same weights, and make the workers; the KV pool takes its memory last."""
    of_decode = await loaded_unless(stop, load_engine(decode, card.decode))
    model = over_same_weights(of_decode.model)
    of_prefill = await loaded_unless(stop, load_engine(prefill, replace(card.prefill, model=model)))
    return [
        PrefillWorker(prefill, of_prefill, telemetries[0]),
        DecodeWorker(decode, of_decode, telemetries[1]),
    ]


async def _serve_both(workers: list[Worker], stop: asyncio.Event) -> int:
    """Serve with all workers until the first ends; return the worst exit status."""
    tasks = [asyncio.create_task(worker.run(stop)) for worker in workers]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if not stop.is_set():
        log.info("one worker has ended: the other one drains")
        stop.set()
    return max(await asyncio.gather(*tasks))
