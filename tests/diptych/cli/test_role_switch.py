"""A worker that asks for its other role by its exit status, under a supervisor."""

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from diptych.cli.child import ChildSpec
from diptych.cli.process_events import ChangedRole, Ended
from diptych.runtime.role_change import EXIT_STATUS, ROLES, other_role, role_asked_by
from tests.diptych.cli.specs import alive, program_spec
from tests.diptych.cli.test_supervisor import Watched


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    watched = Watched()
    yield watched
    pids = [one.pid for one in watched.supervisor.running() if one.pid is not None]
    await watched.supervisor.stop(("prefill", "decode"))
    assert not any(alive(pid) for pid in pids)


def worker(name: str, role: str, *, decode: str = "becomes:prefill") -> ChildSpec:
    """A worker whose programs of both roles end for the other one at SIGHUP; `decode` is that one's mode."""
    modes = {"prefill": "becomes:decode", "decode": decode}
    either = {one: program_spec(name, mode, role=one) for one, mode in modes.items()}
    return replace(either[role], roles=either)


def end(watched: Watched, name: str, signum: signal.Signals) -> None:
    pid = watched.process(name).pid
    assert pid is not None
    os.kill(pid, signum)


def test_statuses_are_of_one_role_each() -> None:
    assert {role_asked_by(EXIT_STATUS[role]) for role in ROLES} == set(ROLES)
    assert [role_asked_by(status) for status in (0, 1, 2, -9, 143)] == [None] * 5
    assert [other_role(role) for role in ROLES] == [*reversed(ROLES)]


async def test_worker_is_started_in_the_role_that_it_asks_for_and_back(watched: Watched) -> None:
    await watched.supervisor.start([worker("prefill-0", "prefill"), worker("decode-0", "decode")])
    end(watched, "prefill-0", signal.SIGHUP)
    await watched.until_serving("decode-1", 1)
    changed = watched.process("decode-1")
    assert (changed.role, changed.restarts) == ("decode", 1)
    assert {one.name for one in watched.supervisor.running()} == {"decode-0", "decode-1"}

    end(watched, "decode-1", signal.SIGHUP)
    await watched.until_serving("prefill-0", 2)
    assert {one.name for one in watched.supervisor.running()} == {"decode-0", "prefill-0"}
    assert [one.role for one in watched.events if isinstance(one, ChangedRole)] == ["decode", "prefill"]
    assert not [one for one in watched.events if isinstance(one, Ended)], "no change is a failure"


async def test_worker_that_dies_is_started_in_its_present_role(watched: Watched) -> None:
    await watched.supervisor.start([worker("prefill-0", "prefill")])
    end(watched, "prefill-0", signal.SIGHUP)
    await watched.until_serving("decode-0", 1)
    end(watched, "decode-0", signal.SIGKILL)
    await watched.until_serving("decode-0", 2)
    assert watched.process("decode-0").role == "decode"


async def test_worker_whose_new_program_does_not_start_is_what_it_was(watched: Watched) -> None:
    await watched.supervisor.start([worker("prefill-0", "prefill", decode="fail")])
    end(watched, "prefill-0", signal.SIGHUP)
    await watched.until_serving("prefill-0", 2)
    assert [(one.name, one.role) for one in watched.supervisor.running()] == [("prefill-0", "prefill")]
    assert "status 3" in next(one.reason for one in watched.events if isinstance(one, Ended))


async def test_process_of_one_role_is_started_as_it_was(watched: Watched) -> None:
    await watched.supervisor.start([program_spec("prefill-0", "becomes:decode")])
    end(watched, "prefill-0", signal.SIGHUP)
    await watched.until_serving("prefill-0", 2)
    assert not [one for one in watched.events if isinstance(one, ChangedRole)]
