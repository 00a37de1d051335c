"""Scenes on a running system: streams alone, prompts alone, both together, and a prefix again.

Every scene has prompts of its own, so that no prefix is found in a cache but where that is the scene.
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass

from diptych.bench.backends import Backend
from diptych.bench.datasets.synthetic import RandomLengths, SharedPrefix
from diptych.bench.drive import Run, drive
from diptych.bench.load import Load
from diptych.bench.measurement import Figures, latencies
from diptych.bench.request import BenchRequest, Outcome
from lab.interference.systems import APART, LENDING
from lab.peers.interference import LONG_PROMPT, STREAM_PROMPT, STREAMS, Connect, watch

PREFIX = 2000
_SUFFIX = 8
_SETTLE_S = 0.5


@dataclass(frozen=True)
class Sizes:
    """Length of each scene: streams are watched for `alone_s`, or `beside_s` where prompts arrive too."""

    stream_tokens: int = 96
    prompts: int = 8
    prefixes: int = 2
    alone_s: float = 3.0
    beside_s: float = 7.0


class Incomplete(Exception):
    """A request of a scene failed, or was not what the scene is about; a figure would be of another load."""


async def play(connect: Connect, system: str, seed: int, sizes: Sizes) -> Figures:
    """Return the figures of one round on one system. Raises Incomplete or RequestFailed."""
    figures: Figures = {}
    async with connect(lambda moment: None) as backend:
        await _warm_up(backend, seed, PREFIX if system == LENDING else LONG_PROMPT)
        if system == APART:
            figures |= await _streams_and_prompts(connect, seed, sizes.beside_s)
        else:
            # No time for prompts: the streams are alone until they are left.
            watched = await watch(connect, seed, sizes.alone_s, 0.0)
            figures |= latencies("itl_alone", watched.gaps(watched.begin, watched.middle))
            figures |= await _one_stream(backend, seed + 11, sizes.stream_tokens)
        await asyncio.sleep(_SETTLE_S)  # streams were left in the middle: their steps end first
        figures |= await _prompts_alone(backend, seed + 20, sizes.prompts)
        if system == LENDING:
            figures |= await _prefix_again(backend, seed + 30, sizes.prefixes)
    return figures


async def _warm_up(backend: Backend, seed: int, longest: int) -> None:
    """Connections, buffers and threads of both phases; the longest prompt comes first, buffers only grow."""
    await _closed(backend, RandomLengths(longest, 4), 1, 1, seed + 40)
    await _closed(backend, RandomLengths(STREAM_PROMPT, 16), STREAMS, STREAMS, seed + 41)


async def _streams_and_prompts(connect: Connect, seed: int, seconds: float) -> Figures:
    """Streams beside prompts, then others alone, which count as far as the former got: with the context grows
    the step, so contexts have to be the same.
    """
    beside = await watch(connect, seed, 0.0, seconds)
    await asyncio.sleep(_SETTLE_S)
    alone = (await watch(connect, seed + 7, seconds, 0.0)).first(beside.shortest())
    return {
        **latencies("itl_alone", alone.gaps(alone.begin, alone.middle)),
        **latencies("itl_beside", beside.gaps(beside.middle, beside.end)),
        "gaps": len(beside.gaps(beside.middle, beside.end)),
        "prompt_throughput_beside": beside.prompt_rate(),
    }


async def _one_stream(backend: Backend, seed: int, tokens: int) -> Figures:
    run = await _closed(backend, RandomLengths(STREAM_PROMPT, tokens), 1, 1, seed)
    return latencies("itl_one", [gap for one in run.outcomes for gap in one.itl])


async def _prompts_alone(backend: Backend, seed: int, prompts: int) -> Figures:
    """Run one client that sends a prompt, takes its first token, and sends the next."""
    run = await _closed(backend, RandomLengths(LONG_PROMPT, 1), 1, prompts, seed)
    return {
        **latencies("ttft_prompt", [one.ttft for one in run.outcomes]),
        "prompt_throughput_alone": prompts * LONG_PROMPT / run.duration,
    }


async def _prefix_again(backend: Backend, seed: int, prefixes: int) -> Figures:
    """Ask with a long new prefix, then with the same one before another question."""
    tails = RandomLengths(_SUFFIX, 1)
    cold: list[float] = []
    warm: list[float] = []
    for number in range(prefixes):
        first, again = SharedPrefix(PREFIX, 1, tails).requests(2, seed + number)
        cold.append((await _one(backend, first, cached=0)).ttft)
        warm.append((await _one(backend, again, cached=PREFIX)).ttft)
    return {
        "median_ttft_cold_ms": 1000 * statistics.median(cold),
        "median_ttft_cached_ms": 1000 * statistics.median(warm),
    }


async def _one(backend: Backend, request: BenchRequest, cached: int) -> Outcome:
    """Raises Incomplete when other tokens than the `cached` first ones came out of a cache."""
    run = _complete(await drive(backend, Load(max_concurrency=1), [request], 0))
    (outcome,) = run.outcomes
    if outcome.reply is not None and outcome.reply.cached_tokens != cached:
        raise Incomplete(f"{outcome.reply.cached_tokens} tokens were cached, not {cached}")
    return outcome


async def _closed(backend: Backend, dataset: RandomLengths, clients: int, count: int, seed: int) -> Run:
    return _complete(await drive(backend, Load(max_concurrency=clients), dataset.requests(count, seed), seed))


def _complete(run: Run) -> Run:
    for one in run.outcomes:
        if one.error is not None:
            raise Incomplete(str(one.error))
    return run
