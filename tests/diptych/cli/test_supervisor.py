import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from diptych.cli.child import Announcement, ChildFailed, ChildSpec
from diptych.cli.http_probe import http_status
from diptych.cli.process_events import Ended, Event, Serving, Wrote
from diptych.cli.restart_policy import LivenessProbe, RestartPolicy
from diptych.cli.supervisor import Running, Supervisor
from tests.diptych.cli.specs import ROOT, alive, program_spec, wait_until

GRACE_S = 20.0
QUICK = RestartPolicy(first_s=0.05, cap_s=0.2)
QUICK_PROBE = LivenessProbe(every_s=0.1, max_failures=3)


class Watched:
    """A supervisor and everything it told so far."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._told = asyncio.Event()
        self.supervisor = Supervisor(
            self._observe, policy=QUICK, liveness=QUICK_PROBE, ready_timeout_s=60, grace_s=GRACE_S
        )

    def _observe(self, event: Event) -> None:
        self.events.append(event)
        self._told.set()

    def process(self, name: str) -> Running:
        return next(one for one in self.supervisor.running() if one.name == name)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not true():
                self._told.clear()
                await self._told.wait()

    async def until_serving(self, name: str, times: int) -> None:
        await self.until(
            lambda: sum(isinstance(one, Serving) and one.name == name for one in self.events) == times
        )


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    watched = Watched()
    yield watched
    pids = [one.pid for one in watched.supervisor.running() if one.pid is not None]
    await watched.supervisor.stop(("gateway", "prefill"))
    assert not any(alive(pid) for pid in pids)


async def test_start_returns_the_announcements(watched: Watched) -> None:
    announced = await watched.supervisor.start([program_spec("one"), program_spec("two")])

    assert [one.announced for one in watched.supervisor.running()] == announced
    assert all(said["grpc_port"] and said["worker_id"] for said in announced)
    assert {one.name for one in watched.events if isinstance(one, Serving)} == {"one", "two"}


async def test_a_killed_process_comes_back_as_another_one_on_the_port_it_keeps(watched: Watched) -> None:
    [first] = await watched.supervisor.start([program_spec("kept", keep_port=True)])
    before = watched.process("kept")
    assert before.pid is not None

    os.kill(before.pid, signal.SIGKILL)
    await watched.until_serving("kept", 2)

    after = watched.process("kept")
    assert after.announced is not None
    assert after.pid != before.pid
    assert after.announced["grpc_port"] == first["grpc_port"]
    assert after.announced["worker_id"] != first["worker_id"]
    assert after.restarts == 1
    [ended] = [one for one in watched.events if isinstance(one, Ended)]
    assert ended.reason == "ended: killed by SIGKILL"


async def test_a_process_that_stops_answering_is_replaced(watched: Watched) -> None:
    async def answers(announced: Announcement) -> bool:
        return await http_status("127.0.0.1", int(announced["http_port"]), "/health", timeout_s=1.0) == 200

    await watched.supervisor.start([replace(program_spec(name), health=answers) for name in ("one", "two")])
    before = {name: watched.process(name).pid for name in ("one", "two")}
    frozen = before["one"]
    assert frozen is not None
    os.kill(frozen, signal.SIGSTOP)
    await watched.until_serving("one", 2)
    assert not alive(frozen)
    assert watched.process("two").pid == before["two"]
    [ended] = [event for event in watched.events if isinstance(event, Ended)]
    assert (ended.name, ended.reason) == ("one", "stopped answering and was killed")


async def test_waits_longer_after_each_failure_in_a_row(watched: Watched) -> None:
    await watched.supervisor.start([program_spec("unlucky")])
    for count in (1, 2, 3):
        pid = watched.process("unlucky").pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await watched.until_serving("unlucky", count + 1)

    assert [one.restart_in_s for one in watched.events if isinstance(one, Ended)] == [0.05, 0.1, 0.2]


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("fail", "ended before it was ready (status 3)"), ("garbage", "announced itself with no JSON")],
)
async def test_a_process_that_does_not_start_is_named_and_gone(
    watched: Watched, mode: str, reason: str
) -> None:
    with pytest.raises(ChildFailed) as failed:
        await watched.supervisor.start([program_spec("bad", mode)])

    assert reason in str(failed.value)
    assert watched.supervisor.running() == []
    if mode == "fail":
        assert "the reason of the failure" in failed.value.last_lines


async def test_process_killed_at_its_first_start_is_started_again_if_the_system_serves(
    watched: Watched, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    mark.touch()

    async def serves_without(spec: ChildSpec) -> bool:
        return spec.name == "late"

    announced = await watched.supervisor.start(
        [program_spec("one"), program_spec("late", f"once:{mark}")], serves_without=serves_without
    )
    assert announced[0] is not None
    assert announced[1] is None
    await watched.until_serving("late", 1)
    [ended] = [event for event in watched.events if isinstance(event, Ended)]
    assert (ended.name, ended.reason) == ("late", "ended before it was ready (killed by SIGKILL)")
    assert ended.restart_in_s == QUICK.first_s


async def test_process_killed_at_its_first_start_ends_the_start_of_a_system_that_does_not_serve(
    watched: Watched, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    mark.touch()

    async def serves_without(_: ChildSpec) -> bool:
        return False

    with pytest.raises(ChildFailed, match="killed by SIGKILL"):
        await watched.supervisor.start([program_spec("bad", f"once:{mark}")], serves_without=serves_without)
    assert watched.supervisor.running() == []


async def test_process_that_says_that_it_cannot_start_ends_the_start(watched: Watched) -> None:
    async def serves_without(_: ChildSpec) -> bool:
        raise AssertionError("another start cannot mend it")

    with pytest.raises(ChildFailed) as failed:
        await watched.supervisor.start([program_spec("bad", "cannot")], serves_without=serves_without)
    assert failed.value.is_final
    assert any("cannot start: the model is missing" in line for line in failed.value.last_lines)


async def test_start_kills_a_process_that_is_not_ready_in_time() -> None:
    supervisor = Supervisor(lambda event: None, ready_timeout_s=0.5)
    with pytest.raises(ChildFailed, match="was not ready after"):
        await supervisor.start([program_spec("mute", "silent")])
    await supervisor.stop()


async def test_stops_by_role_in_order_and_lets_each_finish(watched: Watched) -> None:
    await watched.supervisor.start(
        [program_spec("worker", role="prefill"), program_spec("door", role="gateway")]
    )
    await watched.supervisor.stop(("gateway", "prefill"))

    said = [one.name for one in watched.events if isinstance(one, Wrote) and "stopped cleanly" in one.line]
    assert said == ["door", "worker"]
    watched.supervisor = Supervisor(lambda event: None)


async def test_kills_what_ignores_sigterm_after_the_grace_period() -> None:
    supervisor = Supervisor(lambda event: None, grace_s=0.3)
    await supervisor.start([program_spec("stone", "stubborn")])
    pid = supervisor.running()[0].pid
    assert pid is not None

    began = time.monotonic()
    await supervisor.stop()

    assert 0.3 <= time.monotonic() - began < 10
    assert not alive(pid)


async def test_what_is_still_loading_is_ended_without_grace(watched: Watched) -> None:
    starting = asyncio.create_task(watched.supervisor.start([program_spec("slow", "silent")]))
    await watched.until(lambda: Wrote("slow", "loading") in watched.events)
    pid = watched.process("slow").pid
    starting.cancel()
    await asyncio.wait({starting})

    began = time.monotonic()
    await watched.supervisor.stop()

    assert time.monotonic() - began < GRACE_S / 2
    assert pid is not None
    assert not alive(pid)
    watched.supervisor = Supervisor(lambda event: None)


async def test_a_line_without_end_neither_blocks_the_process_nor_hides_the_next_line(
    watched: Watched,
) -> None:
    await watched.supervisor.start([program_spec("talker", "chatty")])
    await watched.until(lambda: Wrote("talker", "after the long line") in watched.events)

    xs = sum(one.line.count("x") for one in watched.events if isinstance(one, Wrote) and "xxx" in one.line)
    assert xs == 200_000


def test_nothing_outlives_a_supervisor_that_was_killed() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.diptych.cli.supervise"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process, process.stdout:
        pids = json.loads(process.stdout.readline())
        assert len(pids) == 3
        assert all(alive(pid) for pid in pids)
        process.kill()
        process.wait()
        assert wait_until(lambda: not any(alive(pid) for pid in pids), 20)


async def test_a_successor_serves_before_the_old_process_ends(watched: Watched) -> None:
    await watched.supervisor.start([program_spec("one")])
    old = watched.process("one").pid
    seen: list[tuple[int | None, int]] = []

    async def settled(announced: Announcement) -> None:
        assert old is not None
        seen.append((watched.process("one").pid, int(alive(old))))

    await watched.supervisor.replace("one", {}, settled)
    assert seen == [(old, 1)]
    new = watched.process("one")
    assert new.pid not in (old, None)
    assert new.restarts == 1
    assert old is not None
    assert not alive(old)
    assert any(isinstance(event, Wrote) and event.line == "serve stopped cleanly" for event in watched.events)
    os.kill(new.pid or 0, signal.SIGKILL)  # it is kept as the first one was
    await watched.until_serving("one", 3)


async def test_without_a_successor_the_old_one_goes_on(watched: Watched) -> None:
    await watched.supervisor.start([program_spec("one")])
    old = watched.process("one").pid

    async def refuse(_: Announcement) -> None:
        raise ChildFailed("one", "was not linked")

    with pytest.raises(ChildFailed, match="not linked"):
        await watched.supervisor.replace("one", {}, refuse)
    assert watched.process("one").pid == old
    assert len(watched.supervisor.running()) == 1


async def test_what_cannot_have_a_successor_ends_and_comes_back(watched: Watched) -> None:
    await watched.supervisor.start([program_spec("one", keep_port=True)])
    before = watched.process("one")
    await watched.supervisor.end_and_await("one")
    after = watched.process("one")
    assert after.pid != before.pid
    assert before.announced is not None
    assert after.announced is not None
    assert after.announced["grpc_port"] == before.announced["grpc_port"]
