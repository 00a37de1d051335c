"""Capacity, then a high load, an overload and the time after it, on one running system.

Every load is open but the first: requests come at random instants whether or not the system keeps up. Prompts
are all different, so that no prefix cache helps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from diptych.bench.backends import Backend
from diptych.bench.datasets.synthetic import RandomLengths
from diptych.bench.drive import drive
from diptych.bench.load import Load
from diptych.bench.request import BenchRequest, Outcome, RequestFailed

CLIENTS = 24  # that keep prefill and decode both busy
EDGE_S = 2.0  # at a phase's begin, which is not yet like the rest of it
REST_S = 3.0
AFTER_S = 2.0  # so soon after an overload all is to be as before
RECOVERY_S = 8.0
REFUSED_PAUSE_S = 0.2


@dataclass(frozen=True)
class Plan:
    """``seconds`` of each load; ``high`` and ``over`` are multiples of the capacity."""

    seconds: float = 60.0
    input_len: int = 128
    output_len: int = 48
    high: float = 0.8
    over: float = 4.0
    seed: int = 1


@dataclass(frozen=True)
class Phase:
    """Results of one load. Only what was delivered between ``start`` and ``end`` counts as throughput."""

    outcomes: tuple[Outcome, ...]
    start: float
    end: float

    @property
    def tokens_per_s(self) -> float:
        """Output of requests that were answered in full."""
        tokens = 0.0
        for one in self.outcomes:
            if one.reply is not None and one.reply.arrivals:
                inside = sum(self.start <= moment < self.end for moment in one.reply.arrivals)
                tokens += one.reply.output_tokens * inside / len(one.reply.arrivals)
        return tokens / (self.end - self.start)

    @property
    def ttfts(self) -> list[float]:
        return sorted(one.ttft for one in self.outcomes if one.reply is not None)

    @property
    def refusals(self) -> list[float]:
        """Seconds from sending to the refusal."""
        return sorted(one.ended - one.sent for one in self.outcomes if one.error is not None)

    @property
    def codes(self) -> set[str]:
        return {one.error.code for one in self.outcomes if one.error is not None}


@dataclass(frozen=True)
class Played:
    """Phases of one run; ``rate`` is the capacity in requests a second."""

    rate: float
    peak: Phase
    high: Phase
    over: Phase
    after: Phase


async def play(backend: Backend, plan: Plan) -> Played:
    """Raises RequestFailed when the system answers nothing at all."""
    lengths = RandomLengths(plan.input_len, plan.output_len)
    peak = await _closed(backend, lengths, plan)
    rate = peak.tokens_per_s / plan.output_len
    if not rate:
        raise RequestFailed("NO_OUTPUT", "no request was answered")
    await asyncio.sleep(REST_S)
    high = await _open(backend, lengths, plan.high * rate, plan.seconds, plan.seed + 2)
    await asyncio.sleep(REST_S)
    over, after = await _over_and_after(backend, lengths, rate, plan)
    return Played(rate, peak, high, over, after)


async def _over_and_after(
    backend: Backend, lengths: RandomLengths, rate: float, plan: Plan
) -> tuple[Phase, Phase]:
    """End the overload at once; soon after, while its last answers still run, begin a high load."""

    async def later() -> Phase:
        await asyncio.sleep(plan.seconds + AFTER_S)
        return await _open(backend, lengths, plan.high * rate, RECOVERY_S, plan.seed + 4)

    async with asyncio.TaskGroup() as group:
        over = group.create_task(_open(backend, lengths, plan.over * rate, plan.seconds, plan.seed + 3))
        after = group.create_task(later())
    return over.result(), after.result()


async def _open(backend: Backend, lengths: RandomLengths, rate: float, seconds: float, seed: int) -> Phase:
    requests = lengths.requests(max(round(rate * seconds), 2), seed)
    start = time.perf_counter()
    run = await drive(backend, Load(request_rate=rate), requests, seed)
    return Phase(run.outcomes, start + EDGE_S, start + seconds)


async def _closed(backend: Backend, lengths: RandomLengths, plan: Plan) -> Phase:
    """Keep so many clients busy at all times; a refused one comes back a little later."""
    loads = [lengths.requests(200, plan.seed * 1000 + number) for number in range(CLIENTS)]
    until = time.perf_counter() + min(plan.seconds, 20.0)
    start = time.perf_counter() + EDGE_S
    outcomes: list[Outcome] = []

    async def client(requests: Sequence[BenchRequest]) -> None:
        for request in requests:
            sent = time.perf_counter()
            if sent > until:
                return
            try:
                reply = await backend.send(request)
            except RequestFailed:
                await asyncio.sleep(REFUSED_PAUSE_S)
            else:
                outcomes.append(Outcome(request, sent, sent, time.perf_counter(), reply))

    async with asyncio.TaskGroup() as group:
        for requests in loads:
            group.create_task(client(requests))
    return Phase(tuple(outcomes), start, until)
