"""Streams beside prompts: which gaps count, and how long a run must be."""

import asyncio
import time

import pytest

from benchmarks.peers.interference import LONG_PROMPT, STREAMS, Mixed, measure_streams, stream_tokens
from benchmarks.request import BenchRequest, Reply, RequestFailed


def test_only_gaps_count_while_all_streams_decode() -> None:
    mixed = Mixed(streams=((0.0, 1.0, 2.0, 3.0), (0.5, 1.75, 2.5, 4.5)), prompts=())
    assert mixed.window() == (0.5, 3.0)
    assert mixed.gaps() == [1.0, 1.0, 1.25, 0.75]


def test_a_prompt_counts_for_the_share_of_it_inside_the_window() -> None:
    streams = ((0.0, 4.0), (1.0, 5.0))  # window from 1 to 4
    mixed = Mixed(streams, prompts=((-1.0, 0.5), (0.5, 1.5), (1.5, 2.5), (3.5, 5.5), (6.0, 7.0)))
    assert mixed.prompt_rate() == pytest.approx(LONG_PROMPT * (0.5 + 1.0 + 0.25) / 3)


def test_there_is_no_rate_without_prompts_or_without_a_window() -> None:
    assert Mixed(((0.0, 1.0),), ()).prompt_rate() is None
    assert Mixed(((0.0, 1.0), (2.0, 3.0)), ((0.0, 1.0),)).prompt_rate() is None


def test_answers_are_as_long_as_the_window_needs() -> None:
    assert stream_tokens(0.020, 8.0) == 400
    assert stream_tokens(2.0, 8.0) == 48
    assert stream_tokens(0.001, 8.0) == 1200


class Stalling:
    """Each token of a stream takes 1 ms; every long prompt takes 30 ms, in which the streams stand still."""

    name = "stalling"

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.busy = asyncio.Lock()
        self.asked: list[tuple[int | None, int]] = []

    async def model(self) -> str:
        return "none"

    async def close(self) -> None:
        pass

    async def send(self, request: BenchRequest) -> Reply:
        self.asked.append((request.prompt_len, request.output_len))
        if request.prompt_len == LONG_PROMPT:
            if self.fails:
                raise RequestFailed("BROKEN", "as told")
            async with self.busy:
                await asyncio.sleep(0.03)
            await asyncio.sleep(0.005)
            return Reply((time.perf_counter(),), LONG_PROMPT, 1, 0, "")
        arrivals = []
        for _ in range(request.output_len):
            async with self.busy:
                pass
            await asyncio.sleep(0.001)
            arrivals.append(time.perf_counter())
        return Reply(tuple(arrivals), 128, request.output_len, 0, "")


async def test_sees_the_stalls_that_prompts_cause() -> None:
    server = Stalling()
    figures = await measure_streams(server, seed=3, window_s=0.5)
    alone, beside = figures["median_itl_alone_ms"], figures["p99_itl_beside_ms"]
    assert alone is not None
    assert beside is not None
    assert beside > 25 > alone
    assert (figures["prompt_throughput_beside"] or 0) > 0
    assert sum(prompt_len == 128 for prompt_len, _ in server.asked) == 3 * STREAMS


async def test_a_failed_request_is_no_figure() -> None:
    with pytest.raises(RequestFailed, match="BROKEN"):
        await measure_streams(Stalling(fails=True), seed=3, window_s=0.5)
