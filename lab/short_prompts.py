"""`python -m lab.short_prompts`: what a prompt with few new tokens waits for, by where it is computed.

Systems with `--local-prefill auto` and `never`, in place and over tcp, by turns. On each, prompts that are
cached wholly and prompts with a short new end are asked one after the other, at first on an idle system, then
beside streams and beside prompts of 2,000 tokens that come back to back. TTFT is the client's; ITL is that of
the streams beside.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from diptych.client import AsyncClient
from diptych.runtime.python_module import module_command
from lab.interference.neighbours import Ticks
from lab.peers.process import RunningServer
from lab.peers.servers import Server

MODES = ("auto", "never")
TRANSPORTS = ("shared_memory", "tcp")
PREFIX, SUFFIX, LONG, STREAM = 2000, 24, 2000, 64
"""Tokens: of the cached prefix, of a new end, of the prompts beside, of a stream's prompt."""
STREAMS = 4
IDLE_ASKS = 8
VOCABULARY = 40_000
SETTLE_S = 1.5


@dataclass
class Times:
    """Seconds of one system in one round."""

    idle: dict[str, list[float]] = field(default_factory=lambda: {"cached": [], "suffix": []})
    busy: dict[str, list[float]] = field(default_factory=lambda: {"cached": [], "suffix": []})
    itl: list[float] = field(default_factory=list)
    long: list[float] = field(default_factory=list)
    local: int = 0
    asked: int = 0


class Scene:
    """Scene of one round on a running system; `seed` makes its prompts."""

    def __init__(self, client: AsyncClient, seed: int) -> None:
        self.client = client
        self.rng = random.Random(seed)
        self.times = Times()
        self.prefix = self._tokens(PREFIX)

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1000, VOCABULARY) for _ in range(count)]

    async def ttft(self, prompt: Sequence[int]) -> tuple[float, bool]:
        """Return the seconds until the first token, and whether the decode worker computed the prompt."""
        began, first, local = time.perf_counter(), 0.0, False
        options = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        async with aclosing(self.client.stream(list(prompt), timeout_s=120, **options)) as stream:  # type: ignore[arg-type]
            async for chunk in stream:
                first = first or time.perf_counter() - began
                local = chunk.timings.local_prefill if chunk.timings is not None else local
        return first, local

    async def short_prompts(self, into: Mapping[str, list[float]], until: float, most: int) -> None:
        """Ask both kinds by turns, one at a time, until a moment or so many of each."""
        for number in range(2 * most):
            if time.perf_counter() > until:
                return
            kind = ("cached", "suffix")[number % 2]
            prompt = self.prefix if kind == "cached" else [*self.prefix, *self._tokens(SUFFIX)]
            seconds, local = await self.ttft(prompt)
            into[kind].append(seconds)
            self.times.local += local
            self.times.asked += 1
            await asyncio.sleep(0.05)

    async def stream(self) -> None:
        """Stream without an end, and record the gaps between tokens."""
        options = {"max_tokens": 4000, "temperature": 0.0, "ignore_eos": True}
        last = 0.0
        async with aclosing(self.client.stream(self._tokens(STREAM), timeout_s=300, **options)) as stream:  # type: ignore[arg-type]
            async for chunk in stream:
                now = time.perf_counter()
                if last and chunk.token_ids:
                    self.times.itl += [(now - last) / len(chunk.token_ids)] * len(chunk.token_ids)
                last = now

    async def long_prompts(self) -> None:
        """Send long prompts back to back."""
        while True:
            self.times.long.append((await self.ttft(self._tokens(LONG)))[0])

    async def play(self, seconds: float) -> Times:
        """Return the times of the idle and of the busy system."""
        await self.ttft(self.prefix)
        await asyncio.sleep(SETTLE_S)
        await self.short_prompts(self.times.idle, time.perf_counter() + seconds, IDLE_ASKS)
        beside = [asyncio.create_task(self.stream()) for _ in range(STREAMS)]
        beside.append(asyncio.create_task(self.long_prompts()))
        await asyncio.sleep(SETTLE_S)
        self.times.itl.clear()
        await self.short_prompts(self.times.busy, time.perf_counter() + seconds, 10_000)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        return self.times


def server(mode: str, transport: str, dtype: str, model: str) -> Server:
    """Describe a system."""
    return Server(
        name=f"{mode}-{transport}",
        family="diptych",
        start_timeout_s=240.0,
        precision=dtype,
        arguments=(
            *module_command("diptych"),
            *("up", "--dtype", dtype, "--model", model, "--transport", transport),
            *("--set", f"gateway.local-prefill={mode}"),
            *("--grpc-port", "{port}", "--http-port", "{spare_port}", "--ready-file", "{ready_file}"),
        ),
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile by the nearest rank. Raises ValueError without values."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[min(len(values) * percent // 100, len(values) - 1)]


Figures = dict[str, float]


def figures(times: Times) -> Figures:
    """Return milliseconds of one round: p50 of TTFT, p50 and p99 of ITL; and the share of local prompts."""
    found: Figures = {}
    for state, by_kind in (("idle", times.idle), ("busy", times.busy)):
        for kind, values in by_kind.items():
            if values:
                found[f"{state}, {kind}: TTFT p50 ms"] = 1000 * percentile(values, 50)
    if times.itl:
        found["streams beside: ITL p50 ms"] = 1000 * percentile(times.itl, 50)
        found["streams beside: ITL p99 ms"] = 1000 * percentile(times.itl, 99)
    if times.long:
        found["2,000-token prompts beside: TTFT p50 ms"] = 1000 * percentile(times.long, 50)
    if times.asked:
        found["short prompts computed locally, %"] = 100 * times.local / times.asked
    return found


def table(rounds: Mapping[tuple[str, str], Sequence[Figures]]) -> Iterator[str]:
    """Yield lines of a table by transport: medians over the rounds, and the median of ratios within them."""
    for transport in dict.fromkeys(transport for _, transport in rounds):
        yield f"\n| {transport} | auto | never | auto / never |\n|---|---|---|---|"
        auto, never = (rounds.get((mode, transport), ()) for mode in MODES)
        for name in dict.fromkeys(itertools.chain.from_iterable([*auto, *never])):
            cells = [[one[name] for one in side if name in one] for side in (auto, never)]
            ratios = [
                one[name] / other[name]
                for one, other in zip(auto, never, strict=False)
                if one.get(name) and other.get(name)
            ]
            texts = [f"{statistics.median(values):.1f}" if values else "–" for values in cells]
            ratio = f"{statistics.median(ratios):.2f}" if ratios else "–"
            yield f"| {name} | {texts[0]} | {texts[1]} | {ratio} |"


async def _played(address: str, seed: int, seconds: float) -> Times:
    async with AsyncClient(address) as client:
        return await Scene(client, seed).play(seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rounds and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m lab.short_prompts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each busy scene")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--transports", nargs="*", default=list(TRANSPORTS), choices=TRANSPORTS)
    options = parser.parse_args(argv)
    rounds: dict[tuple[str, str], list[Figures]] = {}
    others: list[float] = []
    with tempfile.TemporaryDirectory(prefix="diptych-short-") as folder:
        for number, transport in itertools.product(range(options.rounds), options.transports):
            for mode in MODES if number % 2 == 0 else MODES[::-1]:
                with RunningServer(server(mode, transport, options.dtype, options.model), Path(folder)) as up:
                    before = Ticks.now()
                    found = figures(asyncio.run(_played(up.address, number, options.seconds)))
                    others.append(Ticks.now().others_since(before, os.cpu_count() or 1))
                rounds.setdefault((mode, transport), []).append(found)
                print(f"round {number + 1}, {mode}, {transport}: {found}", file=sys.stderr, flush=True)
    print(*table(rounds), sep="\n")
    print(f"\nCores that others used meanwhile: {100 * statistics.median(others):.0f}%.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
