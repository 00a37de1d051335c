"""What counts as throughput, and which figures miss their targets."""

from __future__ import annotations

import asyncio
import time

import pytest

from diptych.bench.request import BenchRequest, Outcome, Reply, RequestFailed
from lab.overload.phases import Phase, Plan, Played, play
from lab.overload.report import lines, table

REQUEST = BenchRequest((1, 2, 3), 4)


def answered(sent: float, ttft: float, tokens: int = 4) -> Outcome:
    arrivals = tuple(sent + ttft + 0.01 * n for n in range(tokens))
    return Outcome(REQUEST, sent, sent, arrivals[-1], Reply(arrivals, 3, tokens, 0, ""))


def refused(sent: float, seconds: float, code: str = "QUEUE_FULL") -> Outcome:
    return Outcome(REQUEST, sent, sent, sent + seconds, None, RequestFailed(code, "no"))


def phase(*outcomes: Outcome, end: float = 10.0) -> Phase:
    return Phase(outcomes, 0.0, end)


def played(over: Phase, after: Phase | None = None) -> Played:
    calm = phase(*(answered(n / 10, 0.5) for n in range(90)))
    return Played(9.0, calm, calm, over, after or calm)


def test_only_what_came_in_the_window_counts() -> None:
    assert phase(answered(1, 0.1), answered(20, 0.1), refused(2, 0.1)).tokens_per_s == 0.4
    half = answered(9.98, 0.0)  # two of its four tokens come before the end
    assert phase(half).tokens_per_s == 0.2


def test_all_is_well() -> None:
    over = phase(*(answered(n / 10, 0.9) for n in range(90)), *(refused(n / 10, 0.01) for n in range(200)))
    found = lines(played(over))
    assert all(line.met for line in found)
    assert "| overload | 290 | 90 | 200 |" in table(played(over), found)


def test_each_miss_is_named() -> None:
    slow = phase(*(answered(n / 10, 1.1) for n in range(90)), refused(1, 0.03), refused(1, 0.01, "INTERNAL"))
    later = phase(*(answered(n, 1.1) for n in range(9)), refused(1, 0.01))
    missed = {line.name for line in lines(played(slow, later)) if not line.met}
    assert missed == {"TTFT p99 of those taken", "refusal p99", "other errors", "from 2 s after it"}
    few = phase(*(answered(n / 10, 0.5) for n in range(80)))
    assert [line.name for line in lines(played(few)) if not line.met] == ["goodput"]


class Instant:
    """A backend that answers at once."""

    name = "instant"

    def __init__(self) -> None:
        self.sent = 0

    async def model(self) -> str:
        return "m"

    async def send(self, request: BenchRequest) -> Reply:
        self.sent += 1
        await asyncio.sleep(0.2)
        return Reply((time.perf_counter(),), 3, 1, 0, "")

    async def close(self) -> None:
        pass


async def test_every_load_is_a_multiple_of_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("EDGE_S", 0.1), ("REST_S", 0.0), ("AFTER_S", 0.1), ("RECOVERY_S", 0.2)):
        monkeypatch.setattr(f"lab.overload.phases.{name}", seconds)
    backend = Instant()
    made = await play(backend, Plan(seconds=0.5, output_len=1))
    assert made.rate > 20
    assert len(made.high.outcomes) == round(0.8 * made.rate * 0.5)
    assert len(made.over.outcomes) == round(4 * made.rate * 0.5)
    assert made.after.outcomes
