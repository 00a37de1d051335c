"""How soon clients get their next token after a worker is killed or stopped.

    python -m tests.faults.next_token [--kills 30] [--stops 16] [--output FILE]

Two workers a role, prompts of 100 tokens, several streams at once. A decode worker is hit while it streams, a
prefill worker between two chunks of a prompt. Each stream whose attempt was repeated gives one sample: from
the signal to the first token after it, seen by the client. All answers must be those without a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise

from diptych.client import AsyncClient, CallFailed, Completion
from tests.end_to_end import tiny_model
from tests.faults.conftest import Breakable
from tests.faults.figures import Figure, Result, add_output, count, seconds, tell
from tests.faults.system import PAIRS, breakable_system, flush_prefixes, settle, signal_if_alive

STREAMS = 10
LENGTH = 100
TOKENS = 120
TIMEOUT_S = 60.0
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
TARGET_S = {"SIGKILL": 1.0, "SIGSTOP": 3.0}
ROLES = ("decode", "prefill")
PROMPTS = [tiny_model.prompt(700 + number, LENGTH) for number in range(STREAMS)]


@dataclass
class Watched:
    """One stream and when its tokens came."""

    came: list[float] = field(default_factory=list)
    tokens: int = 0
    answer: Completion | None = None

    async def read(self, client: AsyncClient, number: int) -> None:
        options = {"temperature": float(number % 2), "seed": 7, "max_tokens": TOKENS, "ignore_eos": True}
        stream = client.stream(PROMPTS[number], timeout_s=TIMEOUT_S, **options)  # type: ignore[arg-type]
        async with aclosing(stream):
            async for chunk in stream:
                if chunk.token_ids:
                    self.tokens += len(chunk.token_ids)  # several, where the client is slow
                    self.came.append(time.monotonic())
            self.answer = stream.received.completion()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.answer.first.token_ids if self.answer is not None else ()

    def wait_s(self, hit_at: float) -> float | None:
        """From the blow to the end of the longest pause after it; None if it was not hit by it.

        What the dead worker had sent before still arrives after the blow.
        """
        if self.answer is None or self.answer.timings is None or not self.answer.timings.retries:
            return None
        after = [hit_at, *(at for at in self.came if at > hit_at)]
        if len(after) == 1:
            return None
        _, end = max((later - sooner, later) for sooner, later in pairwise(after))
        return end - hit_at


@dataclass
class Measured:
    """By (signal, role)."""

    waits_s: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    blows: int = 0
    failures: list[str] = field(default_factory=list)

    def result(self) -> Result:
        figures = [Figure("blows", str(self.blows))]
        for (name, role), waits in sorted(self.waits_s.items()):
            what = f"{name} of a {role} worker to the next token"
            figures.append(seconds(f"{what}, p50", waits, 50, TARGET_S[name]))
            figures.append(seconds(f"{what}, p99", waits, 99, TARGET_S[name]))
        figures.append(count("streams that failed or had other tokens", len(self.failures), 0))
        return Result("From a fault to the next token", figures, failures=self.failures)


async def streams(address: str, watched: Sequence[Watched]) -> None:
    async with AsyncClient(address, retries=0) as client:
        await asyncio.gather(*(one.read(client, number) for number, one in enumerate(watched)))


async def blow(system: Breakable, role: str, signum: int, turn: int) -> tuple[list[Watched], float]:
    """All streams, one of whose workers was hit, and when that was."""
    watched = [Watched() for _ in range(STREAMS)]
    if role == "prefill":
        system.armory.arm("prefill.chunk", "freeze", after=turn % STREAMS)
    running = asyncio.create_task(streams(system.address, watched))
    pid = 0
    try:
        if role == "prefill":
            pid = await asyncio.to_thread(system.armory.wait_taken, "prefill.chunk")
        else:
            wanted = random.Random(turn).randrange(3, TOKENS // 3)
            while sum(one.tokens for one in watched) < STREAMS * wanted and not running.done():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            pid = system.stack.account["decode"][turn % 2]["pid"]
        hit_at = time.monotonic()
        signal_if_alive(pid, signum)
        await running
    finally:
        running.cancel()
        if pid:
            signal_if_alive(pid, signal.SIGCONT)
    return watched, hit_at


def measure(system: Breakable, plan: Sequence[tuple[str, str]], *, say: bool = True) -> Measured:
    """Strike as `plan` says: (signal, role)."""
    right = [Watched() for _ in range(STREAMS)]
    asyncio.run(streams(system.address, right))
    measured = Measured()
    for turn, (name, role) in enumerate(plan):
        system.stack.wait_idle(30)
        flush_prefixes(system.stack)
        measured.blows += 1
        try:
            got, hit_at = asyncio.run(blow(system, role, SIGNALS[name], turn))
        except (AssertionError, CallFailed) as error:
            measured.failures.append(f"{name} {role}: {error}")
            settle(system.stack)
            continue
        waits = [wait for one in got if (wait := one.wait_s(hit_at)) is not None]
        measured.waits_s[name, role] += waits
        for one, whole in zip(got, right, strict=True):
            if one.token_ids != whole.token_ids:
                measured.failures.append(f"{name} {role}: other tokens")
        if say:
            print(f"{name} {role}: {', '.join(f'{wait:.2f} s' for wait in waits)}", flush=True)
        settle(system.stack)
    return measured


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.next_token", description=__doc__)
    parser.add_argument("--kills", type=int, default=30, help="of both roles, by turns")
    parser.add_argument("--stops", type=int, default=16)
    add_output(parser)
    options = parser.parse_args(argv)
    plan = [(name, ROLES[turn % 2]) for name, turns in _turns(options) for turn in range(turns)]
    with breakable_system(*PAIRS) as (system, _):
        measured = measure(system, plan)
    return tell(measured.result(), options.output)


def _turns(options: argparse.Namespace) -> list[tuple[str, int]]:
    return [("SIGKILL", options.kills), ("SIGSTOP", options.stops)]


if __name__ == "__main__":
    sys.exit(main())
