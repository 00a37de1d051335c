"""Fleets and traffic of the replay's tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from diptych.bench.datasets.traces import TraceRow
from diptych.replay.fleet import ReplayFleet
from diptych.replay.step_times import StepTimes


@dataclass(frozen=True)
class Straight:
    """Times that are straight lines, so that a run of steps takes exactly what its steps do."""

    def prefill_s(self, new_tokens: float, cached_tokens: float) -> float:
        return 0.001 + 0.00002 * new_tokens

    def step_s(self, batch: float, context: float) -> float:
        return 0.005 + 0.0001 * batch + 0.0000001 * batch * context


FLEET = ReplayFleet(2, 2, StepTimes(Straight(), handoff_s=0.003), blocks=4000, max_tokens=20_000)
COPYING = replace(FLEET, times=StepTimes(Straight(), pull_s=0.000002, handoff_s=0.003))


def conversations(count: int, rate: float, seed: int = 0, users: int = 40) -> Iterator[TraceRow]:
    """Yield turns of chats, each of which begins with the turns before it; few chats have most turns."""
    source = random.Random(seed)
    chats: dict[int, list[int]] = {}
    at, fresh = 0.0, 0
    for _ in range(count):
        at += source.expovariate(rate)
        chat = chats.setdefault(min(int(source.expovariate(4 / users)), users), [])
        if len(chat) > 8:
            chat.clear()
        for _ in range(source.randint(1, 2)):
            fresh += 1
            chat.append(fresh)
        length = 512 * len(chat) + source.randrange(512)
        yield TraceRow(at, length, source.randint(1, 200), (*chat, 1_000_000 + fresh))
