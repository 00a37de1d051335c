"""The load that disaggregation is for: streams that decode while long prompts arrive back to back.

Eight clients read long answers; one more sends a 512-token prompt, takes the first token and sends the
next. What counts is the gap between two messages of a stream (ITL), and how many prompt tokens a second get
through beside them. Only the time counts in which all streams were decoding.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.backends import Backend
from benchmarks.datasets.synthetic import RandomLengths
from benchmarks.measurement import Figures, latencies
from benchmarks.request import BenchRequest

STREAMS = 8
STREAM_PROMPT, LONG_PROMPT = 128, 512
_PROBE_TOKENS = 24
_FEWEST, _MOST = 48, 1_200  # tokens of a stream: enough gaps for a percentile, and within the model's context
_PROMPTS = 400  # more than any window can see
_OTHER_SEED = 500


@dataclass(frozen=True)
class Mixed:
    """What one run saw: each stream's moments of output, and when each long prompt was sent and answered."""

    streams: tuple[tuple[float, ...], ...]
    prompts: tuple[tuple[float, float], ...]

    def window(self) -> tuple[float, float]:
        """From the last stream's first token to the first stream's last one."""
        return max(one[0] for one in self.streams), min(one[-1] for one in self.streams)

    def gaps(self) -> list[float]:
        """Seconds between two outputs of a stream, both of them inside the window."""
        begin, end = self.window()
        return [
            later - earlier
            for one in self.streams
            for earlier, later in itertools.pairwise(one)
            if begin <= earlier and later <= end
        ]

    def prompt_rate(self) -> float | None:
        """Prompt tokens a second inside the window; a prompt that was cut by its edge counts for its
        share."""
        begin, end = self.window()
        if end <= begin or not self.prompts:
            return None
        shares = [
            max(0.0, min(end, answered) - max(begin, sent)) / (answered - sent)
            for sent, answered in self.prompts
        ]
        return LONG_PROMPT * sum(shares) / (end - begin)


def stream_tokens(mean_gap_s: float, window_s: float) -> int:
    """How long answers must be for a window of about `window_s`."""
    return max(_FEWEST, min(_MOST, round(window_s / mean_gap_s)))


async def measure_streams(backend: Backend, seed: int, window_s: float) -> Figures:
    """ITL of the streams alone, then beside prompts. A short run first says how slow the server is then.

    Raises RequestFailed.
    """
    alone = await _run(backend, seed, _FEWEST * 2, with_prompts=False)
    probe = await _run(backend, seed + 1, _PROBE_TOKENS, with_prompts=True)
    gaps = probe.gaps()
    tokens = stream_tokens(sum(gaps) / len(gaps), window_s) if gaps else _FEWEST
    beside = await _run(backend, seed + 2, tokens, with_prompts=True)
    return {
        **latencies("itl_alone", alone.gaps()),
        **latencies("itl_beside", beside.gaps()),
        "gaps": len(beside.gaps()),
        "prompt_throughput_beside": beside.prompt_rate(),
        "stream_tokens": tokens,
    }


async def _run(backend: Backend, seed: int, tokens: int, *, with_prompts: bool) -> Mixed:
    asked = RandomLengths(STREAM_PROMPT, tokens).requests(STREAMS, seed)
    prompts = RandomLengths(LONG_PROMPT, 1).requests(_PROMPTS, seed + _OTHER_SEED) if with_prompts else []
    stop = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(_back_to_back(backend, prompts, stop))
            try:
                replies = await asyncio.gather(*(backend.send(one) for one in asked))
            finally:
                stop.set()
    except ExceptionGroup as failures:  # the first one ended the others
        raise failures.exceptions[0] from None
    return Mixed(tuple(reply.arrivals for reply in replies), tuple(sending.result()))


async def _back_to_back(
    backend: Backend, prompts: Sequence[BenchRequest], stop: asyncio.Event
) -> list[tuple[float, float]]:
    """The last prompt is finished, too: what it got inside the window counts."""
    answered: list[tuple[float, float]] = []
    for prompt in prompts:
        if stop.is_set():
            break
        sent = time.perf_counter()
        await backend.send(prompt)
        answered.append((sent, time.perf_counter()))
    return answered
