"""Text beside images that wait for an encode worker: these hold no place that others could use."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from diptych.client import AsyncClient, Completion, chat
from tests import vision_models
from tests.faults.conftest import Breakable
from tests.faults.encoder_kills import ASKS, FLAGS, WITHOUT_OWN, ask
from tests.faults.failpoints import kill
from tests.faults.requests import LONG, TIMEOUT_S, check_same, stream
from tests.faults.system import breakable_system, flush_prefixes, settle, signal_if_alive

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
PLACES = sum(options.get("n", 1) for options in ASKS.values())
TEXTS = 4


@pytest.fixture
def system() -> Iterator[Breakable]:
    """One encode worker, no other encoder, and as many places as the images' requests take."""
    write = partial(vision_models.write, "idefics3")
    places = ("--encode-workers", "1", "--set", f"gateway.max-inflight={PLACES}")
    with breakable_system(*FLAGS, *WITHOUT_OWN, *places, write=write) as (made, _):
        yield made


def ask_text(address: str) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        async with AsyncClient(address, retries=0) as client:
            prompts = [chat(f"What is {number}?") for number in range(TEXTS)]
            return await asyncio.gather(
                *(stream(client, one, {"temperature": 0.0, **LONG}) for one in prompts)
            )

    return asyncio.run(all_of_them())


class Away:
    """An encode worker that was killed, and whose successors are stopped as soon as they are there."""

    def __init__(self, system: Breakable) -> None:
        self._system, self._over, self._stopped = system, threading.Event(), set[int]()
        self._thread = threading.Thread(target=self._stop)

    def __enter__(self) -> None:
        for pid in self._pids():
            kill(pid)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for pid in self._stopped:
            signal_if_alive(pid, signal.SIGCONT)

    def _stop(self) -> None:
        while not self._over.is_set():
            for pid in self._pids() - self._stopped:
                signal_if_alive(pid, signal.SIGSTOP)
                self._stopped.add(pid)
            time.sleep(0.05)

    def _pids(self) -> set[int]:
        return {int(one["pid"]) for one in self._system.stack.account["encode"] if one.get("pid")}


def test_text_is_answered_while_images_wait_in_as_many_places_as_there_are(system: Breakable) -> None:
    flush_prefixes(system.stack)
    expected, text = ask(system.address), ask_text(system.address)
    system.stack.wait_idle(120)
    flush_prefixes(system.stack)
    system.armory.arm("encode.received", "freeze")
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(ask, system.address)
        system.armory.wait_taken("encode.received")
        with Away(system):
            got = ask_text(system.address)
            assert not asked.done(), "the images' requests gave up before those of text had a place"
        answers = asked.result(TIMEOUT_S)
    for right, answer in zip(text, got, strict=True):
        assert answer.choices == right.choices
    check_same(expected, answers)
    settle(system.stack)
