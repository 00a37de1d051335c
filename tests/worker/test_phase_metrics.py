"""What a decode worker's metrics say of where the time of its attempts went, however these ended."""

from __future__ import annotations

import asyncio

import pytest

from decode_worker.config import DecodeSettings
from decode_worker.request import DecodeRequest, State
from decode_worker.worker import DecodeWorker
from engine.runner import Runner
from runtime.telemetry import Telemetry
from tests.kvtransfer.conftest import until
from tests.worker.asker import Gateway, work
from tests.worker.house import house, layout, model
from worker.engine import LoadedEngine

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


def observed(request: DecodeRequest) -> dict[str, list[float]]:
    """How often a worker has counted each phase of this one attempt, and how long it was."""
    engine = LoadedEngine(model(), Runner(model(), 1), layout(), "tiny", "fp32")
    settings = DecodeSettings.from_argv(["--kv-blocks=16", "--redis-url=redis://127.0.0.1:1/0"])
    worker = DecodeWorker(settings, engine, Telemetry.start("t", "w"))
    worker._ended(request)
    found: dict[str, list[float]] = {}
    for family in worker._registry.collect():
        for sample in family.samples:
            if sample.name in [f"diptych_request_phase_duration_seconds_{what}" for what in ("count", "sum")]:
                found.setdefault(sample.labels["phase"], []).append(sample.value)
    return found


async def test_a_cancelled_attempt_decoded_for_as_long_as_it_did() -> None:
    """The gateway also ends so what a stop string or a time limit ends."""
    async with house("shared_memory", blocks=64) as made:
        gateway, decode = Gateway(made), made.decodes[0]
        heard = gateway.start(decode, made.prefills[0], work(("r", 1), PROMPT, 400))
        await until(lambda: len(heard.tokens) > 1)
        taken = decode.pool.allocate(decode.pool.available())  # so that it lasts, whatever the machine
        await asyncio.sleep(0.2)
        decode.loop.attempts.cancel(("r", 1))
        decode.pool.release(taken)
        await until(lambda: bool(decode.ended))
        await gateway.close()
    request = decode.ended[0]
    phases = observed(request)
    lasted = request.entered[State.ENDED] - request.entered[State.RUNNING]
    assert lasted >= 0.2
    assert phases["decode"] == [1, pytest.approx(lasted)]
    assert phases["decode_queue"][0] == 1


async def test_a_phase_that_never_ran_is_not_counted() -> None:
    async with house("shared_memory", blocks=64) as made:
        gateway, decode = Gateway(made), made.decodes[0]
        heard = gateway.start(decode, made.prefills[0], work(("r", 1), PROMPT, 1))
        await heard.ended.wait()
        await until(lambda: bool(decode.ended))
        await gateway.close()
    assert observed(decode.ended[0]).keys() == {"decode_queue"}
