"""Metrics and spans of attempts, however these ended."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from decode_worker.config import DecodeSettings
from decode_worker.request import DecodeRequest, State
from decode_worker.request import attempt_span as decode_span
from decode_worker.worker import DecodeWorker
from diptych.engine.runner import Runner
from diptych.runtime.telemetry import Telemetry
from diptych.worker.v1 import work_pb2
from diptych.worker_process.loaded_engine import LoadedEngine
from prefill_worker.config import PrefillSettings
from prefill_worker.request import PrefillRequest, attempt_span
from prefill_worker.worker import PrefillWorker
from tests.diptych.worker_process.both_workers import house, layout, model
from tests.diptych.worker_process.scripted_gateway import Gateway, work
from tests.kvtransfer.conftest import until

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


def counting(request: DecodeRequest) -> CollectorRegistry:
    """The metrics of a decode worker that has had this one attempt."""
    engine = LoadedEngine(model(), Runner(model(), 1), layout(), "tiny", "fp32")
    settings = DecodeSettings.from_argv(["--kv-blocks=16", "--redis-url=redis://127.0.0.1:1/0"])
    worker = DecodeWorker(settings, engine, Telemetry.start("t", "w"))
    worker._ended(request)
    return worker._registry


def counting_prefill(request: PrefillRequest, outcome: str) -> CollectorRegistry:
    engine = LoadedEngine(model(), Runner(model(), 1), layout(), "tiny", "fp32")
    settings = PrefillSettings.from_argv(["--redis-url=redis://127.0.0.1:1/0"])
    worker = PrefillWorker(settings, engine, Telemetry.start("t", "w"))
    worker._ended(request, outcome)
    return worker._registry


def phases_of(registry: CollectorRegistry) -> dict[str, list[float]]:
    """Count and sum of each phase that was counted."""
    found: dict[str, list[float]] = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name in [f"diptych_request_phase_duration_seconds_{what}" for what in ("count", "sum")]:
                found.setdefault(sample.labels["phase"], []).append(sample.value)
    return {phase: values for phase, values in found.items() if values[0]}


def lost(registry: CollectorRegistry) -> float:
    """Handoffs that failed."""
    return sum(
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "diptych_kv_transfer_failures_total"
    )


async def test_a_cancelled_attempt_has_its_decode_phase() -> None:
    """The gateway also cancels at a stop string or a time limit."""
    async with house("shared_memory", blocks=64) as made:
        gateway, decode = Gateway(made), made.decodes[0]
        heard = gateway.start(decode, made.prefills[0], work(("r", 1), PROMPT, 200))
        await until(lambda: len(heard.tokens) > 2)
        decode.loop.requests.cancel(("r", 1))
        await until(lambda: bool(decode.ended))
        await gateway.close()
    request = decode.ended[0]
    phases = phases_of(counting(request))
    lasted = request.entered[State.ENDED] - request.entered[State.RUNNING]
    assert request.outcome == "cancelled"
    assert phases["decode"] == [1, pytest.approx(lasted)]
    assert phases["decode_queue"][0] == 1


async def test_local_prefill_has_phases_and_counts_of_its_own() -> None:
    async with house("shared_memory", blocks=64) as made:
        gateway, decode = Gateway(made), made.decodes[0]
        local = work_pb2.LOCAL_PREFILL_SHORT
        heard = gateway.start_local(decode, work(("r", 1), PROMPT, 4, local=local))
        await heard.ended.wait()
        await until(lambda: bool(decode.ended))
        await gateway.close()
    request = decode.ended[0]
    registry = counting(request)
    assert phases_of(registry).keys() == {"queue", "kv_alloc_wait", "prefill", "decode_queue", "decode"}
    assert registry.get_sample_value("diptych_local_prefills_total") == 1
    assert registry.get_sample_value("diptych_local_prefill_tokens_total") == len(PROMPT)
    span = decode_span(request)
    assert span is not None
    assert [child.name for child in span.children] == ["kv_alloc_wait", "prefill.local", "queue", "decode"]
    assert span.attributes["diptych.prefill.local"] is True


async def test_refused_local_prefill_is_counted_and_has_no_span() -> None:
    async with house("shared_memory", blocks=64) as made:
        gateway, decode = Gateway(made), made.decodes[0]
        local = work_pb2.LOCAL_PREFILL_SHORT
        heard = gateway.start_local(decode, work(("r", 1), PROMPT * 4, 4, local=local))
        await heard.ended.wait()
        await gateway.close()
    (request,) = decode.ended
    assert counting(request).get_sample_value("diptych_local_prefills_refused_total") == 1
    assert decode_span(request) is None


async def test_a_phase_that_never_ran_is_not_counted() -> None:
    async with house("shared_memory", blocks=64) as made:
        gateway, decode = Gateway(made), made.decodes[0]
        heard = gateway.start(decode, made.prefills[0], work(("r", 1), PROMPT, 1))
        await heard.ended.wait()
        await until(lambda: bool(decode.ended))
        await gateway.close()
    assert phases_of(counting(decode.ended[0])).keys() == {"decode_queue"}


@pytest.mark.parametrize(
    ("reason", "failures"),
    [
        (work_pb2.FAILURE_REASON_KV_TRANSFER_FAILED, 1),
        (work_pb2.FAILURE_REASON_PEER_LOST, 1),
        (work_pb2.FAILURE_REASON_EXCEEDS_KV_CAPACITY, 0),
    ],
)
async def test_the_decode_worker_counts_failed_handoffs(
    reason: work_pb2.FailureReason, failures: int
) -> None:
    async with house("shared_memory", blocks=64) as made:
        gateway, decode = Gateway(made), made.decodes[0]
        taken = decode.pool.allocate(64)  # so that it waits for its handoff
        gateway.start(decode, made.prefills[0], work(("r", 1), PROMPT, 4))
        await until(lambda: decode.handoff.stats().waiting_asks == 1)
        decode.loop.requests.on_failed(("r", 1), reason, "as if")
        decode.pool.release(taken)
        await until(lambda: bool(decode.ended))
        await gateway.close()
    assert lost(counting(decode.ended[0])) == failures


async def test_a_missed_deadline_is_no_failed_handoff() -> None:
    async with house("shared_memory", blocks=64) as made:
        gateway, decode, prefill = Gateway(made), made.decodes[0], made.prefills[0]
        taken = decode.pool.allocate(64)
        for number in range(20):
            gateway.start(decode, prefill, work(("r", number), PROMPT, 4, seconds=0.2))
            await until(lambda ended=number: len(prefill.ended) > ended)
            if prefill.ended[-1][1] != "cancelled":
                break  # else the decode worker's clock, and with it the gateway, was faster
        decode.pool.release(taken)
        await gateway.close()
    request, outcome = prefill.ended[-1]
    assert outcome == "failed"
    assert lost(counting_prefill(request, outcome)) == 0
    assert attempt_span(request, outcome).children[-1].error == "DEADLINE"
