"""Against a real grpc.aio server with scripted timing, over loopback.

Upper bounds are loose: the machine may be busy, and a pause of another process counts.
"""

import time

import pytest

from diptych.bench.backends import Unreachable
from diptych.bench.backends.grpc import GrpcBackend
from diptych.bench.backends.request_parameters import Asking
from diptych.bench.drive import Run, drive
from diptych.bench.load import Load
from diptych.bench.measurement import measure
from diptych.bench.request import BenchRequest, RequestFailed
from tests.diptych.bench.scripted_grpc import ScriptedService, serving

REQUEST = BenchRequest((5, 6, 7), 6)


async def ran(service: ScriptedService, count: int, clients: int) -> Run:
    async with serving(service) as address:
        backend = GrpcBackend(address, Asking())
        try:
            return await drive(backend, Load(max_concurrency=clients), [REQUEST] * count, seed=0)
        finally:
            await backend.close()


async def test_measures_the_scripted_times() -> None:
    run = await ran(ScriptedService(ttft=0.1, itl=0.03), count=8, clients=2)
    figures = measure(run, None, exact_lengths=True).figures
    assert figures["completed"] == 8
    assert figures["short_outputs"] == 0
    assert figures["total_input_tokens"] == 24
    assert figures["total_output_tokens"] == 48
    assert figures["total_cached_tokens"] == 8
    assert figures["tokens_per_message"] == 1.0
    assert 99 <= (figures["median_ttft_ms"] or 0) < 200
    assert 29 <= (figures["median_itl_ms"] or 0) < 60
    assert 29 <= (figures["median_tpot_ms"] or 0) < 60
    assert 249 <= (figures["median_e2el_ms"] or 0) < 500
    assert figures["max_concurrent_requests"] == 2


async def test_reads_the_servers_own_times() -> None:
    figures = measure(await ran(ScriptedService(), 2, 1), None, exact_lengths=True).figures
    assert figures["median_handoff_ms"] == pytest.approx(48 - 3 - 40)
    assert figures["median_kv_transfer_ms"] == pytest.approx(2)
    assert figures["median_server_queue_ms"] == pytest.approx(3)
    assert figures["median_server_prefill_ms"] == pytest.approx(40)


async def test_tells_of_output_while_it_comes() -> None:
    seen: list[float] = []
    async with serving(ScriptedService(itl=0.01)) as address:
        backend = GrpcBackend(address, Asking(on_output=seen.append))
        reply = await backend.send(REQUEST)
        await backend.close()
    assert tuple(seen) == reply.arrivals


async def test_counts_tokens_of_messages_with_several() -> None:
    service = ScriptedService(itl=0.05, per_message=3)
    figures = measure(await ran(service, 2, 1), None, exact_lengths=True).figures
    assert figures["total_output_tokens"] == 12
    assert figures["tokens_per_message"] == 3.0
    assert 30 <= (figures["median_itl_ms"] or 0) < 100  # between messages; a late one is near the next
    assert 6 <= (figures["median_tpot_ms"] or 0) < 30  # 50 ms over five tokens


async def test_counts_refused_and_broken_streams_apart() -> None:
    refusing = measure(await ran(ScriptedService(refuse_every=3), 9, 1), None, exact_lengths=True)
    assert refusing.errors == {"RESOURCE_EXHAUSTED": 3}
    assert refusing.figures["completed"] == 6
    breaking = measure(await ran(ScriptedService(break_after=2), 2, 1), None, exact_lengths=True)
    assert breaking.errors == {"ABORTED": 2}


async def test_asks_for_what_the_flags_say() -> None:
    service = ScriptedService()
    async with serving(service) as address:
        fixed = GrpcBackend(address, Asking(model="mine", temperature=0.5))
        await fixed.send(BenchRequest((9, 8), 3))
        await fixed.close()
        free = GrpcBackend(address, Asking(ignore_eos=False))
        reply = await free.send(BenchRequest("Hello", 4))
        await free.close()
    first, second = service.seen
    assert (first.model, list(first.token_ids.ids), first.stopping.max_tokens) == ("mine", [9, 8], 3)
    assert first.stopping.ignore_eos
    assert first.sampling.temperature == 0.5
    assert (second.model, second.text, second.stopping.ignore_eos) == ("scripted", "Hello", False)
    assert reply.text == " a a a a"


async def test_gives_up_at_its_time_limit() -> None:
    async with serving(ScriptedService(ttft=30)) as address:
        backend = GrpcBackend(address, Asking(model="m", timeout_s=0.2))
        started = time.monotonic()
        with pytest.raises(RequestFailed, match="DEADLINE_EXCEEDED"):
            await backend.send(REQUEST)
        await backend.close()
    assert time.monotonic() - started < 10


async def test_model_raises_unreachable_without_a_server() -> None:
    backend = GrpcBackend("127.0.0.1:1", Asking())
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
        await backend.model()
    await backend.close()
