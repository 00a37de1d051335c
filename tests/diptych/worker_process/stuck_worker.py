"""A decode worker whose step never ends, as a process: `SECONDS FLAGS...`, see `test_leaving.py`."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from typing import Any

from decode_worker.config import DecodeSettings
from decode_worker.worker import DecodeWorker
from diptych.engine.runner import Runner
from diptych.runtime.process import leave, run_program
from diptych.runtime.telemetry import Telemetry
from diptych.worker_process import server as shell
from diptych.worker_process.loaded_engine import LoadedEngine
from tests.diptych.worker_process.both_workers import layout, model


def main(seconds: float, flags: list[str]) -> int:
    """`seconds` are those in which a step may end."""
    settings = DecodeSettings.from_argv(flags)
    shell.CLOSE_S = seconds

    async def serve(stop: asyncio.Event) -> int:
        engine = LoadedEngine(model(), Runner(model(), 1), layout(), "tiny", "fp32")
        worker = DecodeWorker(settings, engine, Telemetry.start("t", "w"))
        loop: Any = worker._loop
        close = loop.close

        def closing() -> None:
            logging.getLogger("stuck").info("closing")
            close()

        loop.close = closing
        step = asyncio.create_task(loop._step.compute([loop], [0], _never))
        status = await worker.run(stop)
        await step
        return status

    return run_program(serve, settings)


def _never(rows: object, abort: object) -> list[Any]:
    threading.Event().wait()
    return []


if __name__ == "__main__":
    leave(main(float(sys.argv[1]), sys.argv[2:]))
