"""Loops without a network: the backend here only sleeps, and writes down when it was called."""

import asyncio
import time

import pytest

from diptych.bench.drive import drive
from diptych.bench.load import Load, think_times
from diptych.bench.request import BenchRequest, Reply, RequestFailed

REQUESTS = [BenchRequest((number,), 1) for number in range(30)]


class Sleeper:
    name = "sleeper"

    def __init__(self, seconds: float, fails: frozenset[int] = frozenset()) -> None:
        self.seconds, self.fails = seconds, fails
        self.calls: list[tuple[float, object]] = []
        self.running = self.most = 0

    async def model(self) -> str:
        return "none"

    async def close(self) -> None:
        pass

    async def send(self, request: BenchRequest) -> Reply:
        self.calls.append((time.perf_counter(), request.prompt))
        number = len(self.calls)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1
        if number in self.fails:
            raise RequestFailed("BROKEN", "as told")
        return Reply((time.perf_counter(),), 1, 1, 0, "")


@pytest.mark.parametrize("clients", [1, 4, 50])
async def test_a_closed_loop_keeps_its_clients_busy(clients: int) -> None:
    backend = Sleeper(0.01)
    run = await drive(backend, Load(max_concurrency=clients), REQUESTS, seed=0)
    assert backend.most == min(clients, len(REQUESTS))
    assert [prompt for _, prompt in backend.calls] == [one.prompt for one in REQUESTS]
    assert len(run.outcomes) == len(REQUESTS)
    assert run.duration >= 0.01 * len(REQUESTS) / clients


async def test_a_client_thinks_before_each_request_but_its_first() -> None:
    backend = Sleeper(0.0)
    run = await drive(backend, Load(max_concurrency=2, think_s=0.05), REQUESTS[:8], seed=0)
    pauses = think_times(8, 0.05, 0)
    assert run.duration >= sum(pauses[2:]) / 2
    starts = [moment for moment, _ in backend.calls]
    assert starts[2] - starts[0] >= min(pauses[2:4]) > starts[1] - starts[0]


def test_think_times_have_their_mean() -> None:
    times = think_times(20_000, 2.0, seed=1)
    assert sum(times) / len(times) == pytest.approx(2.0, rel=0.05)
    assert think_times(3, 0.0, seed=1) == [0.0] * 3


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    backend = Sleeper(0.5)
    run = await drive(backend, Load(request_rate=200.0), REQUESTS, seed=0)
    assert backend.most == len(REQUESTS)
    offered = [one.due for one in sorted(run.outcomes, key=lambda one: one.due)]
    assert offered[-1] - offered[0] == pytest.approx(29 / 200)
    assert all(one.sent >= one.due - 0.002 for one in run.outcomes)  # timers of uvloop have milliseconds


async def test_a_cap_makes_an_open_loop_wait_and_shows_the_wait() -> None:
    backend = Sleeper(0.02)
    run = await drive(backend, Load(float("inf"), None), REQUESTS[:6], seed=0)
    assert backend.most == 6
    capped = Sleeper(0.02)
    run = await drive(capped, Load(1000.0, 2), REQUESTS[:6], seed=0)
    assert capped.most == 2
    assert max(one.sent - one.due for one in run.outcomes) >= 0.03


async def test_replays_a_trace_at_its_own_times() -> None:
    moments = [0.0, 0.05, 0.05, 0.2]
    requests = [BenchRequest((1,), 1, moment) for moment in moments]
    run = await drive(Sleeper(0), Load(request_rate=None), requests, seed=0)
    start = min(one.due for one in run.outcomes)
    assert sorted(one.due - start for one in run.outcomes) == pytest.approx(moments)
    assert run.duration >= 0.19


async def test_only_a_trace_can_be_replayed() -> None:
    with pytest.raises(ValueError, match="trace"):
        await drive(Sleeper(0), Load(request_rate=None), REQUESTS, seed=0)


@pytest.mark.parametrize("load", [Load(max_concurrency=3), Load(request_rate=1000.0)])
async def test_goes_on_after_failures(load: Load) -> None:
    ended = 0

    def count() -> None:
        nonlocal ended
        ended += 1

    run = await drive(Sleeper(0.001, frozenset([1, 5])), load, REQUESTS, 0, count)
    assert ended == len(run.outcomes) == len(REQUESTS)
    assert all(one.error is None or one.error.code == "BROKEN" for one in run.outcomes)
    assert any(one.error is not None for one in run.outcomes)


async def test_a_client_of_a_closed_loop_waits_after_a_failure() -> None:
    """Or a server that is gone would be asked for all prompts within milliseconds."""
    run = await drive(Sleeper(0, frozenset(range(9))), Load(max_concurrency=2), REQUESTS[:8], seed=0)
    assert 0.15 <= run.duration < 1


async def test_a_fault_of_the_generator_ends_it() -> None:
    class Faulty(Sleeper):
        async def send(self, request: BenchRequest) -> Reply:
            raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        await drive(Faulty(0), Load(max_concurrency=2), REQUESTS, seed=0)
    assert caught.group_contains(ZeroDivisionError)
