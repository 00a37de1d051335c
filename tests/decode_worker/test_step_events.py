"""Launched steps are awaited without a thread, and no end of a step is missed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from decode_worker.pipeline import StepEvents
from diptych.engine.batch import StepOutput

ROUNDS = 10  # of the event loop: more than a wakeup takes


@dataclass
class Step:
    """A launched step that ends when the test says so, without an event."""

    ended: bool = False

    def done(self) -> bool:
        return self.ended

    def collect(self) -> StepOutput:
        raise AssertionError("waiting is not collecting")


@dataclass
class Backend:
    """The two ends of a pipe, as a backend has them."""

    heard: int
    told: int

    def tell(self, times: int = 1) -> None:
        os.write(self.told, b"\0" * times)

    def unread(self) -> bytes:
        try:
            return os.read(self.heard, 100)
        except BlockingIOError:
            return b""


@pytest.fixture
def backend() -> Iterator[Backend]:
    heard, told = os.pipe2(os.O_NONBLOCK)
    yield Backend(heard, told)
    os.close(heard)
    os.close(told)


async def turns() -> None:
    for _ in range(ROUNDS):
        await asyncio.sleep(0)


def test_wait_returns_when_the_step_is_done(backend: Backend) -> None:
    async def run() -> None:
        completions, step = StepEvents(backend.heard), Step()
        waiting = asyncio.create_task(completions.wait(step))
        await turns()
        assert not waiting.done()
        step.ended = True
        backend.tell()
        await asyncio.wait_for(waiting, 5)
        assert backend.unread() == b""
        completions.close()

    asyncio.run(run())


def test_wait_ignores_the_byte_of_another_step(backend: Backend) -> None:
    async def run() -> None:
        completions, step = StepEvents(backend.heard), Step()
        waiting = asyncio.create_task(completions.wait(step))
        for _ in range(3):
            backend.tell(2)
            await asyncio.sleep(0.01)
        assert not waiting.done()
        step.ended = True
        backend.tell()
        await asyncio.wait_for(waiting, 5)
        completions.close()

    asyncio.run(run())


def test_wait_yields_to_the_event_loop_for_a_step_that_is_done(backend: Backend) -> None:
    """Else steps that are shorter than the work between them would starve the loop."""

    async def run() -> None:
        completions, step = StepEvents(backend.heard), Step(ended=True)
        others = asyncio.create_task(asyncio.sleep(0))
        for _ in range(3):
            await completions.wait(step)
        assert others.done()
        completions.close()

    asyncio.run(run())


def test_close_removes_the_reader_and_another_loop_can_wait(backend: Backend) -> None:
    completions = StepEvents(backend.heard)

    async def run() -> None:
        await completions.wait(Step(ended=True))
        completions.close()
        backend.tell()
        await asyncio.sleep(0.01)
        assert backend.unread() == b"\0"

    asyncio.run(run())
    asyncio.run(run())
