"""`python -m lab.kv_tiers`: what KV tiers give to conversations that return, and what they cost else.

Systems with and without `--kv-tier`, by turns, over a pool that holds a tenth of the conversations. On each:

1. every conversation is asked once, then again in another order with a few more tokens: TTFT, and the share
   of the tokens that were cached;
2. prompts that have nothing in common with any before: tokens a second;
3. with tiers, the system is started again over the same folder, and some conversations return.

TTFT is the client's. Ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from diptych.client import AsyncClient
from diptych.runtime.python_module import module_command
from lab.interference.neighbours import Ticks
from lab.peers.process import RunningServer
from lab.peers.servers import Server

WITH, WITHOUT = MODES = ("tiers", "none")
BLOCK = 16
TURN = 20
"""Tokens that a returning conversation adds."""
OUTPUT = 4
VOCABULARY = 40_000
SETTLE_S = 1.5

Figures = dict[str, float]


@dataclass(frozen=True)
class Size:
    """Size of the load: the conversations hold `times` what the pool does."""

    pool_blocks: int
    tokens: int
    times: int
    new_prompts: int
    ram: str
    disk: str

    @property
    def conversations(self) -> int:
        """Number of conversations."""
        return max(2, self.times * self.pool_blocks * BLOCK // self.tokens)


def server(mode: str, size: Size, folder: Path, options: argparse.Namespace) -> Server:
    """Describe a system."""
    tiers = (f"--kv-tier=ram:{size.ram}", f"--kv-tier=disk:{folder}:{size.disk}") if mode == WITH else ()
    return Server(
        name=mode,
        family="diptych",
        start_timeout_s=240.0,
        precision=options.dtype,
        arguments=(
            *module_command("diptych"),
            *("up", "--dtype", options.dtype, "--model", options.model),
            *("--kv-blocks", str(size.pool_blocks), *tiers),
            *("--grpc-port", "{port}", "--http-port", "{spare_port}", "--ready-file", "{ready_file}"),
        ),
    )


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, VOCABULARY) for _ in range(count)]


async def _ask(client: AsyncClient, prompt: Sequence[int], tokens: int = OUTPUT) -> tuple[float, int]:
    """Return the seconds until the first token, and the cached tokens of the prompt."""
    began, first, cached = time.perf_counter(), 0.0, 0
    options = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    async with aclosing(client.stream(list(prompt), timeout_s=300, **options)) as stream:  # type: ignore[arg-type]
        async for chunk in stream:
            first = first or time.perf_counter() - began
            cached = chunk.usage.cached_prompt_tokens if chunk.usage is not None else cached
    return first, cached


async def returning(address: str, conversations: Sequence[list[int]], rng: random.Random) -> Figures:
    """Ask every conversation once more, in another order."""
    times, cached, held = list[float](), 0, 0
    async with AsyncClient(address) as client:
        for one in rng.sample(conversations, len(conversations)):
            seconds, tokens = await _ask(client, [*one, *_tokens(rng, TURN)])
            times.append(1000 * seconds)
            cached += tokens
            held += len(one) // BLOCK * BLOCK
    return {"TTFT p50 ms": statistics.median(times), "cached, % of their full blocks": 100 * cached / held}


async def play(address: str, conversations: Sequence[list[int]], size: Size, seed: int) -> Figures:
    """Return the figures of one system in one round."""
    rng = random.Random(seed)
    async with AsyncClient(address) as client:
        first = [1000 * (await _ask(client, one))[0] for one in conversations]
        await asyncio.sleep(SETTLE_S)
        again = await returning(address, conversations, rng)
        prompts = [_tokens(rng, size.tokens // 2) for _ in range(size.new_prompts)]
        began = time.perf_counter()
        for prompt in prompts:
            await _ask(client, prompt)
        seconds = time.perf_counter() - began
    figures = {f"returning: {name}": value for name, value in again.items()}
    figures["first visit: TTFT p50 ms"] = statistics.median(first)
    figures["nothing cached: prompt tokens/s"] = sum(map(len, prompts)) / seconds
    return figures


def table(rounds: Mapping[str, Sequence[Figures]]) -> Iterator[str]:
    """Yield lines of a table: medians over the rounds, and the median of ratios within them."""
    yield "| | tiers | none | tiers / none |\n|---|---|---|---|"
    names = dict.fromkeys(name for mode in MODES for one in rounds[mode] for name in one)
    for name in names:
        sides = [[one[name] for one in rounds[mode] if name in one] for mode in MODES]
        ratios = [one / other for one, other in zip(*sides, strict=False) if other]
        cells = [f"{statistics.median(side):,.1f}" if side else "–" for side in sides]
        ratio = f"{statistics.median(ratios):.3f}" if ratios else "–"
        yield f"| {name} | {cells[0]} | {cells[1]} | {ratio} |"


def measure(mode: str, size: Size, seed: int, folder: Path, options: argparse.Namespace) -> Figures:
    """Run one system in one round; with tiers start it again at the end."""
    rng = random.Random(f"{seed} conversations")
    conversations = [_tokens(rng, size.tokens) for _ in range(size.conversations)]
    with tempfile.TemporaryDirectory(dir=folder) as made:
        tiers = Path(made) / "kv"
        with RunningServer(server(mode, size, tiers, options), folder) as up:
            figures = asyncio.run(play(up.address, conversations, size, seed))
        if mode == WITH:
            last = conversations[-max(1, len(conversations) // 8) :]
            with RunningServer(server(mode, size, tiers, options), folder) as up:
                again = asyncio.run(returning(up.address, last, rng))
            figures |= {f"after a restart: {name}": value for name, value in again.items()}
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(prog="python -m lab.kv_tiers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pool-blocks", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=800, help="of a conversation")
    parser.add_argument("--times", type=int, default=10, help="what they hold together, in pools")
    parser.add_argument("--new-prompts", type=int, default=40, help="that have nothing in common")
    parser.add_argument("--ram", default="256m")
    parser.add_argument("--disk", default="4g")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model", default="bundled")
    options = parser.parse_args(argv)
    size = Size(
        options.pool_blocks, options.tokens, options.times, options.new_prompts, options.ram, options.disk
    )
    rounds: dict[str, list[Figures]] = {mode: [] for mode in MODES}
    others: list[float] = []
    with tempfile.TemporaryDirectory(prefix="diptych-tiers-") as folder:
        for number in range(options.rounds):
            for mode in MODES if number % 2 == 0 else MODES[::-1]:
                before = Ticks.now()
                rounds[mode].append(measure(mode, size, number, Path(folder), options))
                others.append(Ticks.now().others_since(before, os.cpu_count() or 1))
                print(f"round {number + 1}, {mode}: {rounds[mode][-1]}", file=sys.stderr, flush=True)
    print(
        f"{size.conversations} conversations of {size.tokens} tokens, a pool of {size.pool_blocks} blocks.\n"
    )
    print(*table(rounds), sep="\n")
    print(f"\nCores that others used meanwhile: {100 * statistics.median(others):.0f}%.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
