"""Sends the requests of one load and collects what came of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass

from diptych.bench.backends import Backend
from diptych.bench.cpu_time import CpuTime
from diptych.bench.load import Load, arrival_times, think_times
from diptych.bench.request import BenchRequest, Outcome, RequestFailed
from diptych.bench.self_watch import SelfWatch, Strain

_PAUSE_S = 0.050  # of a client after a failure: a server that is gone fails thousands of requests a second


@dataclass(frozen=True)
class Run:
    """Run of one load. `duration` is from the first request's sending to the last one's end.

    ``steal_share``: of the cores' time, what the hypervisor gave to other guests meanwhile.
    """

    outcomes: tuple[Outcome, ...]
    duration: float
    strain: Strain
    steal_share: float = 0.0


async def drive(
    backend: Backend,
    load: Load,
    requests: Sequence[BenchRequest],
    seed: int,
    on_end: Callable[[], None] = lambda: None,
) -> Run:
    """Send all requests under `load`; `on_end` is called after each. Failures are outcomes, too."""
    if load.closed and load.max_concurrency is not None:
        pauses = think_times(len(requests), load.think_s, seed)
        sending = _closed_loop(backend, requests, pauses, load.max_concurrency, on_end)
    else:
        sending = _open_loop(backend, requests, _offsets(load, requests, seed), load.max_concurrency, on_end)
    before = CpuTime.now()
    async with SelfWatch() as watch:
        outcomes = await sending
    duration = max(one.ended for one in outcomes) - min(one.sent for one in outcomes) if outcomes else 0.0
    return Run(tuple(outcomes), duration, watch.strain(), CpuTime.now().steal_since(before))


async def _closed_loop(
    backend: Backend,
    requests: Sequence[BenchRequest],
    pauses: Sequence[float],
    clients: int,
    on_end: Callable[[], None],
) -> list[Outcome]:
    """Send all requests from `clients` clients; each pauses before a request that is not its first."""
    waiting = iter(zip(requests, pauses, strict=True))
    outcomes: list[Outcome] = []

    async def client() -> None:
        first = True
        for request, pause_s in waiting:  # shared: each client takes the next one
            if not first:
                await asyncio.sleep(pause_s)
            first = False
            outcomes.append(await _one(backend, request, time.perf_counter()))
            on_end()
            if outcomes[-1].error is not None:
                await asyncio.sleep(_PAUSE_S)

    await _all(client() for _ in range(min(clients, len(requests))))
    return outcomes


async def _open_loop(
    backend: Backend,
    requests: Sequence[BenchRequest],
    offsets: Sequence[float],
    limit: int | None,
    on_end: Callable[[], None],
) -> list[Outcome]:
    slots = contextlib.nullcontext() if limit is None else asyncio.Semaphore(limit)
    outcomes: list[Outcome] = []
    start = time.perf_counter()

    async def arrive(request: BenchRequest, due: float) -> None:
        await asyncio.sleep(due - time.perf_counter())
        async with slots:
            outcomes.append(await _one(backend, request, due))
        on_end()

    await _all(arrive(request, start + offset) for request, offset in zip(requests, offsets, strict=True))
    return outcomes


async def _one(backend: Backend, request: BenchRequest, due: float) -> Outcome:
    sent = time.perf_counter()
    try:
        reply = await backend.send(request)
    except RequestFailed as error:
        return Outcome(request, due, sent, time.perf_counter(), None, error)
    return Outcome(request, due, sent, time.perf_counter(), reply)


async def _all(tasks: Iterable[Coroutine[None, None, None]]) -> None:
    async with asyncio.TaskGroup() as group:  # a bug in one ends all, and is raised
        for task in tasks:
            group.create_task(task)


def _offsets(load: Load, requests: Sequence[BenchRequest], seed: int) -> list[float]:
    if load.request_rate is not None:
        return arrival_times(len(requests), load.request_rate, load.burstiness, seed)
    times = [request.arrival_s for request in requests]
    known = [moment for moment in times if moment is not None]
    if len(known) != len(times):
        raise ValueError("only a trace has times of its own: give a request rate or a concurrency")
    return known
