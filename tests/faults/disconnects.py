"""Clients that go away at random instants: how soon their blocks are free, and whether any is lost.

    python -m tests.faults.disconnects [--count 10000] [--output FILE]

Eight streams at a time are dropped in one instant, which is chosen at random from before the dispatch to the
last tokens. From then on the decode worker's metrics are read without a pause, over HTTP, until they show no
request, no block in use and none in quarantine: the sample is the time to that answer, which is that of the
last of the eight and includes one reading of the metrics (printed too, for comparison).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

from diptych.client import AsyncClient, CallFailed
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import StackFailed
from tests.faults.conftest import Breakable
from tests.faults.figures import Figure, Result, add_output, count, seconds, tell
from tests.faults.gauges import Gauges
from tests.faults.system import breakable_system

TOGETHER = 8
TOKENS = 200
LONGEST_S = 0.4
TARGET_S = 0.1
GIVEN_UP_S = 5.0


@dataclass
class Measured:
    reclaim_s: list[float] = field(default_factory=list)
    reading_s: list[float] = field(default_factory=list)
    left: int = 0
    before_first_token: int = 0
    failures: list[str] = field(default_factory=list)

    def result(self) -> Result:
        reading = 1000 * statistics.median(self.reading_s)
        figures = [
            Figure("disconnects", f"{self.left}, {self.before_first_token} of them before the first token"),
            seconds("from the disconnect to all blocks free, p50", self.reclaim_s, 50, TARGET_S),
            seconds("from the disconnect to all blocks free, p99", self.reclaim_s, 99, TARGET_S),
            Figure("of which reading the metrics once, p50", f"{reading:.1f} ms"),
            count("times that blocks were not free after 5 s", len(self.failures), 0),
        ]
        return Result("Disconnects", figures, failures=self.failures)


async def leave(client: AsyncClient, rng: random.Random, measured: Measured) -> float:
    """Start the streams, wait a random time, drop them all; when that was."""
    tokens = [0] * TOGETHER

    async def read(number: int) -> None:
        prompt = tiny_model.prompt(rng.randrange(10**9), rng.choice((5, 40, 100, 160)))
        options = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0, "n": 1 + number % 2}
        async for chunk in client.stream(prompt, **options):  # type: ignore[arg-type]
            tokens[number] += len(chunk.token_ids)

    tasks = [asyncio.create_task(read(number)) for number in range(TOGETHER)]
    await asyncio.sleep(rng.random() ** 2 * LONGEST_S)
    left_at = time.monotonic()
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    measured.left += sum(isinstance(end, asyncio.CancelledError) for end in ends)
    measured.before_first_token += tokens.count(0)
    for end in ends:
        if isinstance(end, CallFailed):
            raise end
    return left_at


async def run(system: Breakable, wanted: int, *, seed: int = 1) -> Measured:
    """Until so many clients have left."""
    rng, measured = random.Random(seed), Measured()
    port = system.stack.account["decode"][0]["http_port"]
    with closing(Gauges(port)) as gauges:
        await _leave_until(system, gauges, measured, wanted, rng)
    try:
        await asyncio.to_thread(system.stack.wait_idle)
    except StackFailed as error:
        measured.failures.append(str(error).partition("\n")[0])
    return measured


async def _leave_until(
    system: Breakable, gauges: Gauges, measured: Measured, wanted: int, rng: random.Random
) -> None:
    async with AsyncClient(system.address, retries=0) as client:
        while measured.left < wanted:
            left_at = await leave(client, rng, measured)
            while True:
                began = time.monotonic()
                busy = await asyncio.to_thread(gauges.busy)
                now = time.monotonic()
                measured.reading_s.append(now - began)
                if not busy:
                    break
                if now - left_at > GIVEN_UP_S:
                    measured.failures.append(f"after {measured.left} disconnects: {busy}")
                    return
            measured.reclaim_s.append(now - left_at)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.disconnects", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    add_output(parser)
    options = parser.parse_args(argv)
    with breakable_system() as (system, _):
        measured = asyncio.run(run(system, options.count))
    return tell(measured.result(), options.output)


if __name__ == "__main__":
    sys.exit(main())
