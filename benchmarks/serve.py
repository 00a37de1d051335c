"""Closed-loop load on a running gateway: TTFT, ITL, throughput, and what the hand-over costs.

    python benchmarks/serve.py --address 127.0.0.1:50051 --concurrency 1,8,16 --rounds 3

Every request has a random prompt of its own (so the prefix cache cannot help) and a fixed number of
output tokens. Percentiles are over all requests of a concurrency; throughput is output tokens over the
time from the first request's start to the last one's end, as a median over the rounds. The key names of
the JSON are those of vLLM's serving benchmark. The hand-over's cost is, per request, TTFT as the gateway
measured it less queueing and prefill: everything between the end of the last chunk's computation and the
first token's arrival at the gateway, plus the gateway's own work before it dispatched the request, so it
is an upper bound.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from diptych.client import AsyncClient, CallFailed, Timings

LOWEST_ID, HIGHEST_ID = 100, 40_000  # ordinary tokens of the bundled model's vocabulary


@dataclass
class Measured:
    """What one request saw, in seconds by the client's clock; `timings` is the server's account."""

    ttft: float
    itl: list[float]
    e2e: float
    tokens: int
    timings: Timings


@dataclass
class Load:
    """All rounds at one concurrency."""

    concurrency: int
    requests: list[Measured] = field(default_factory=list)
    throughput: list[float] = field(default_factory=list)  # output tokens/s of each round
    errors: int = 0


async def measure(client: AsyncClient, prompt: Sequence[int], output_tokens: int) -> Measured:
    """One streamed request. Raises CallFailed."""
    started = time.perf_counter()
    arrivals: list[float] = []
    tokens = 0
    timings: Timings | None = None
    options = {"max_tokens": output_tokens, "temperature": 0.0, "ignore_eos": True}
    async with aclosing(client.stream(prompt, **options)) as stream:  # type: ignore[arg-type]
        async for chunk in stream:
            if chunk.token_ids:
                arrivals.append(time.perf_counter())
                tokens += len(chunk.token_ids)
            timings = chunk.timings or timings
    if timings is None or not arrivals:
        raise RuntimeError("a stream ended without tokens or timings")
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    return Measured(arrivals[0] - started, gaps, time.perf_counter() - started, tokens, timings)


async def one_round(
    client: AsyncClient, load: Load, arguments: argparse.Namespace, rng: random.Random
) -> None:
    """`--requests` requests per client, `load.concurrency` of them in flight."""
    prompts = [
        [rng.randint(LOWEST_ID, HIGHEST_ID) for _ in range(arguments.input_tokens)]
        for _ in range(arguments.requests * load.concurrency)
    ]
    measured: list[Measured] = []

    async def worker() -> None:
        while prompts:
            try:
                measured.append(await measure(client, prompts.pop(), arguments.output_tokens))
            except CallFailed:
                load.errors += 1

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(load.concurrency)))
    load.throughput.append(sum(m.tokens for m in measured) / (time.perf_counter() - started))
    load.requests += measured


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank; nan for no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]


def summary(load: Load) -> dict[str, float]:
    """Figures of one concurrency, times in milliseconds."""
    ttft = [1000 * m.ttft for m in load.requests]
    itl = [1000 * gap for m in load.requests for gap in m.itl]
    handover = [
        1000 * (m.timings.time_to_first_token - m.timings.queue - m.timings.prefill) for m in load.requests
    ]
    transfer = [1000 * m.timings.kv_transfer for m in load.requests]
    return {
        "max_concurrency": load.concurrency,
        "completed": len(load.requests),
        "errors": load.errors,
        "output_throughput": statistics.median(load.throughput),
        "output_throughput_min": min(load.throughput),
        "output_throughput_max": max(load.throughput),
        "median_ttft_ms": percentile(ttft, 50),
        "p99_ttft_ms": percentile(ttft, 99),
        "median_itl_ms": percentile(itl, 50),
        "p99_itl_ms": percentile(itl, 99),
        "median_handover_ms": percentile(handover, 50),
        "p99_handover_ms": percentile(handover, 99),
        "median_kv_transfer_ms": percentile(transfer, 50),
        "p99_kv_transfer_ms": percentile(transfer, 99),
    }


def table(rows: Sequence[dict[str, float]]) -> Table:
    shown = Table(
        "concurrency", "tok/s (min–max)", "TTFT p50 / p99 ms", "ITL p50 / p99 ms", "hand-over p50 / p99 ms"
    )
    shown.add_column("errors")
    for row in rows:
        spread = f"{row['output_throughput_min']:.0f}–{row['output_throughput_max']:.0f}"
        shown.add_row(
            str(row["max_concurrency"]),
            f"{row['output_throughput']:.0f} ({spread})",
            f"{row['median_ttft_ms']:.0f} / {row['p99_ttft_ms']:.0f}",
            f"{row['median_itl_ms']:.1f} / {row['p99_itl_ms']:.1f}",
            f"{row['median_handover_ms']:.2f} / {row['p99_handover_ms']:.2f}",
            str(row["errors"]),
        )
    return shown


async def run(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Interleave the concurrencies round by round, so that the machine's drift meets all of them."""
    rng = random.Random(arguments.seed)
    loads = [Load(int(text)) for text in arguments.concurrency.split(",")]
    async with AsyncClient(arguments.address) as client:
        await measure(client, [LOWEST_ID] * arguments.input_tokens, 4)  # connections are made
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("rounds", total=arguments.rounds * len(loads))
            for _ in range(arguments.rounds):
                for load in loads:
                    progress.update(task, description=f"concurrency {load.concurrency}")
                    await one_round(client, load, arguments, rng)
                    progress.advance(task)
    return [summary(load) for load in loads]


def main() -> None:
    parser = argparse.ArgumentParser(description="Closed-loop load on a running Diptych gateway.")
    parser.add_argument("--address", default="127.0.0.1:50051", help="host:port of a gateway")
    parser.add_argument("--concurrency", default="1,8,16", help="clients at the same time, a list")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=4, help="requests of each client and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    rows = asyncio.run(run(arguments))
    Console().print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
