"""The load that disaggregation is for: streams that decode while long prompts arrive back to back.

Eight clients read long answers. Once all have their first token they are watched alone; then one more
client sends 512-token prompts, each as soon as the one before has its first token, or several clients do, so
that there is always a prompt that waits. What counts is the gap between two messages of a stream (ITL), and
how many prompt tokens a second get through beside them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from diptych.bench.backends import Backend
from diptych.bench.datasets.synthetic import RandomLengths
from diptych.bench.measurement import Figures, latencies
from diptych.bench.request import BenchRequest

STREAMS = 8
QUEUED_PROMPTS = 4  # in flight where prompts queue
STREAM_PROMPT, LONG_PROMPT = 128, 512
STREAM_TOKENS = 1_700  # asked for, never read to the end. With its prompt it fits a context of 2,048.
_PROMPTS = 400  # more than are sent
_OTHER_SEED = 500

Connect = Callable[[Callable[[float], None]], AbstractAsyncContextManager[Backend]]
"""A client of its own, which tells the moment of each message with output."""


@dataclass(frozen=True)
class Watched:
    """Moments of each stream's output, when each prompt was sent and answered, and the phases' limits.

    The streams were alone from `begin` to `middle`; from there to `end` prompts arrived.
    """

    streams: tuple[tuple[float, ...], ...]
    prompts: tuple[tuple[float, float], ...]
    begin: float
    middle: float
    end: float

    def figures(self) -> Figures:
        return {
            **latencies("itl_alone", self.gaps(self.begin, self.middle)),
            **latencies("itl_beside", self.gaps(self.middle, self.end)),
            "gaps": len(self.gaps(self.middle, self.end)),
            "prompt_throughput_beside": self.prompt_rate(),
        }

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between two outputs of a stream, both of them between the two moments."""
        return [
            later - earlier
            for one in self.streams
            for earlier, later in itertools.pairwise(one)
            if begin <= earlier and later <= end
        ]

    def shortest(self) -> int:
        """Outputs of the stream with the fewest."""
        return min(len(one) for one in self.streams)

    def first(self, outputs: int) -> Watched:
        """Return the same with so many outputs of each stream at most."""
        return replace(self, streams=tuple(one[:outputs] for one in self.streams))

    def prompt_rate(self) -> float:
        """Prompt tokens a second."""
        return LONG_PROMPT * len(self.prompts) / (self.end - self.middle)


async def watch(connect: Connect, seed: int, alone_s: float, beside_s: float, in_flight: int = 1) -> Watched:
    """Takes both times, and what the last prompts need; `in_flight` of them at once. Raises RequestFailed."""
    asked = RandomLengths(STREAM_PROMPT, STREAM_TOKENS).requests(STREAMS, seed)
    prompts = RandomLengths(LONG_PROMPT, 1).requests(_PROMPTS, seed + _OTHER_SEED)
    arrivals = [_Arrivals() for _ in asked]
    async with AsyncExitStack() as clients:
        enter = clients.enter_async_context
        prompters = [await enter(connect(lambda moment: None)) for _ in range(in_flight)]
        readers = [await enter(connect(one.add)) for one in arrivals]
        async with _running(readers, asked):
            for one in arrivals:
                await one.begun.wait()
            begin = time.perf_counter()
            await asyncio.sleep(alone_s)
            middle = time.perf_counter()
            coming = iter(prompts)
            answered = await asyncio.gather(
                *(_back_to_back(one, coming, middle + beside_s) for one in prompters)
            )
            end = time.perf_counter()
    streams = tuple(tuple(one.moments) for one in arrivals)
    return Watched(streams, tuple(itertools.chain(*answered)), begin, middle, end)


class _Arrivals:
    """Output of one stream as it comes."""

    def __init__(self) -> None:
        self.moments: list[float] = []
        self.begun = asyncio.Event()

    def add(self, moment: float) -> None:
        self.moments.append(moment)
        self.begun.set()


@asynccontextmanager
async def _running(readers: Sequence[Backend], asked: Sequence[BenchRequest]) -> AsyncIterator[None]:
    """Run the streams for as long as the block lasts; they are left in the middle. One that fails ends the
    block."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(one.send(request)) for one, request in zip(readers, asked, strict=True)
            ]
            yield
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failures:  # the first one ended the others
        raise failures.exceptions[0] from None


async def _back_to_back(
    prompter: Backend, prompts: Iterator[BenchRequest], until: float
) -> list[tuple[float, float]]:
    answered: list[tuple[float, float]] = []
    for prompt in prompts:
        sent = time.perf_counter()
        if sent >= until:
            break
        await prompter.send(prompt)
        answered.append((sent, time.perf_counter()))
    return answered
