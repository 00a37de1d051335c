"""The handoff's benchmark runs: two processes, real ends, and every round answered."""

from __future__ import annotations

from lab.handoff import SHAPES, measure, table


async def test_two_processes_handoff_and_say_when():
    taken = await measure(["cuda_ipc"], [40], rounds=2)
    assert list(taken) == [("cuda_ipc", 40)]
    times = taken["cuda_ipc", 40]
    assert len(times) == 2
    assert 0 < times[0] <= times[1] < 60_000
    assert "| 40 |" in table(taken, SHAPES["bundled"])
