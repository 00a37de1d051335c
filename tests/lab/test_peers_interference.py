"""Streams beside prompts: which gaps count, and what a server that stalls looks like."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from diptych.bench.request import BenchRequest, Reply, RequestFailed
from lab.peers.interference import LONG_PROMPT, STREAMS, Watched, watch


def test_gaps_count_in_the_phase_that_they_lie_in() -> None:
    streams = ((0.0, 1.0, 2.0, 5.0, 6.0, 8.0), (0.5, 1.75, 4.5, 7.0))
    watched = Watched(streams, prompts=(), begin=0.5, middle=4.0, end=7.5)
    assert watched.gaps(0.5, 4.0) == [1.0, 1.25]
    assert watched.gaps(4.0, 7.5) == [1.0, 2.5]
    assert watched.first(watched.shortest()).streams == tuple(
        one[: min(map(len, watched.streams))] for one in watched.streams
    )
    figures = watched.figures()
    assert figures["median_itl_alone_ms"] == pytest.approx(1125)
    assert figures["median_itl_beside_ms"] == pytest.approx(1750)
    assert figures["gaps"] == 2


def test_prompt_tokens_are_counted_over_the_time_in_which_prompts_came() -> None:
    watched = Watched(((0.0,),), prompts=((4.0, 5.0), (5.0, 6.0)), begin=0.0, middle=4.0, end=6.0)
    assert watched.prompt_rate() == LONG_PROMPT


class Stalling:
    """A token takes 1 ms. For every long prompt all streams stand still for 30 ms, or stop for good."""

    def __init__(self, breaks: bool = False) -> None:
        self.breaks, self.stalled = breaks, asyncio.Lock()
        self.open = self.sent = 0

    @asynccontextmanager
    async def connect(self, on_output: Callable[[float], None]) -> AsyncIterator["Client"]:
        self.open += 1
        yield Client(self, on_output)
        self.open -= 1


class Client:
    name = "stalling"

    def __init__(self, server: Stalling, on_output: Callable[[float], None]) -> None:
        self.server, self.on_output = server, on_output

    async def model(self) -> str:
        return "none"

    async def close(self) -> None:
        pass

    async def send(self, request: BenchRequest) -> Reply:
        self.server.sent += 1
        if request.prompt_len == LONG_PROMPT:
            async with self.server.stalled:
                await asyncio.sleep(0.03)
            if self.server.breaks:
                raise RequestFailed("BROKEN", "as told")
            await asyncio.sleep(0.005)
            return Reply((time.perf_counter(),), LONG_PROMPT, 1, 0, "")
        for _ in range(request.output_len):
            async with self.server.stalled:
                pass
            await asyncio.sleep(0.001)
            self.on_output(time.perf_counter())
        return Reply((time.perf_counter(),), 128, request.output_len, 0, "")


async def test_sees_the_stalls_that_prompts_cause() -> None:
    server = Stalling()
    began = time.monotonic()
    watched = await watch(server.connect, seed=3, alone_s=0.2, beside_s=0.4)
    assert time.monotonic() - began < 10  # the streams are left in the middle
    figures = watched.figures()
    assert (figures["p99_itl_beside_ms"] or 0) > 25 > (figures["median_itl_alone_ms"] or 0) > 0
    assert len(watched.streams) == STREAMS
    assert server.sent == STREAMS + len(watched.prompts)
    assert server.open == 0


async def test_so_many_prompts_are_in_flight_as_asked_for() -> None:
    server = Stalling()
    watched = await watch(server.connect, seed=3, alone_s=0.0, beside_s=0.4, in_flight=4)
    together = [
        sum(sent <= moment < answered for sent, answered in watched.prompts)
        for moment in (sent for sent, _ in watched.prompts)
    ]
    assert max(together) == 4
    assert len(watched.prompts) == len(set(watched.prompts))
    assert server.sent == STREAMS + len(watched.prompts)


async def test_a_failed_request_ends_it_all() -> None:
    with pytest.raises(RequestFailed, match="BROKEN"):
        await watch(Stalling(breaks=True).connect, seed=3, alone_s=0.1, beside_s=0.4)
