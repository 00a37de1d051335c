"""Encode workers that are away for longer than requests wait for them: who comes later is served at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from diptych.client import CallFailed
from tests import vision_models
from tests.faults.conftest import Breakable
from tests.faults.encoder_kills import FLAGS, WITHOUT_OWN, ask
from tests.faults.failpoints import kill
from tests.faults.requests import check_same
from tests.faults.system import breakable_system, flush_prefixes, settle, signal_if_alive

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
WAIT = ("--set", "gateway.worker-wait-timeout=15")
TIMES = 4


@pytest.fixture
def system() -> Iterator[Breakable]:
    """Two encode workers, and no other encoder."""
    write = partial(vision_models.write, "idefics3")
    with breakable_system(*FLAGS, *WITHOUT_OWN, *WAIT, write=write) as (made, _):
        yield made


def test_requests_are_not_refused_after_a_time_without_encode_workers(system: Breakable) -> None:
    """Seconds in which prompts waited for a worker are not taken for the speed of prefill."""
    flush_prefixes(system.stack)
    expected = ask(system.address)
    system.stack.wait_idle(120)
    flush_prefixes(system.stack)
    system.armory.arm("encode.received", "freeze")
    stopped: set[int] = set()
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(ask, system.address)
        system.armory.wait_taken("encode.received")
        for pid in _encoders(system):
            kill(pid)
        while not asked.done():  # their successors do not come before the requests have given up
            for pid in _encoders(system) - stopped:
                signal_if_alive(pid, signal.SIGSTOP)
                stopped.add(pid)
            time.sleep(0.05)
    for pid in stopped:
        signal_if_alive(pid, signal.SIGCONT)
    with pytest.raises(CallFailed, match="NO_READY_WORKER"):
        asked.result()
    settle(system.stack)
    for _ in range(TIMES):
        flush_prefixes(system.stack)
        check_same(expected, ask(system.address))


def _encoders(system: Breakable) -> set[int]:
    return {int(one["pid"]) for one in system.stack.account["encode"] if one.get("pid")}
