"""Blocks that are damaged on their way over TCP, one by one, and what checking costs.

    python -m tests.faults.corruptions [--count 10000] [--output FILE]

The sender damages one frame at a time, after its digest was taken: a flipped bit, a frame under its
neighbour's place, one under an earlier grant, one that breaks off in the middle. Prompts have a salt
each, so that every block is sent. No answer may be another than that of the undamaged system; it may fail.

The cost is the time of the digests at both ends, for as many bytes as the bundled model's prompts of 128
tokens send, as a share of their time to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych.client import AsyncClient, CallFailed, Client
from kvtransfer.protocol.messages import GrantRef
from kvtransfer.transports.host_blocks import block_digest
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import running_stack
from tests.faults.conftest import Breakable
from tests.faults.figures import Figure, Result, add_output, count, tell
from tests.faults.system import breakable_system

KINDS = {
    "flipped bit": "handoff.corrupt_push",
    "other place": "handoff.swap_push",
    "earlier grant": "handoff.replay_push",
    "truncated": "handoff.truncate_push",
}
LENGTH = 100
BLOCKS = 7  # of 16 tokens
ANSWER = {"max_tokens": 4, "ignore_eos": True, "temperature": 0.0}
PROMPTS = [tiny_model.prompt(900 + number, LENGTH) for number in range(32)]
TIMEOUT_S = 60.0
CLIENTS = 48
WITHIN = 6  # prompts, one of whose frames is damaged in each way
COST_LENGTH = 128
COST_TARGET = 0.03


@dataclass
class Measured:
    """Of each kind, how many frames were damaged; of all answers, how they ended."""

    damaged: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def figures(self) -> list[Figure]:
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.damaged.items())
        ends = ", ".join(f"{number} {end}" for end, number in self.ended.most_common())
        return [
            Figure("damaged frames", f"{self.damaged.total()} ({kinds})"),
            Figure("answers", ends),
            count("answers with other tokens than without damage", len(self.failures), 0),
        ]


async def run(system: Breakable, wanted: int, *, clients: int = CLIENTS, seed: int = 1) -> Measured:
    """Each kind of damage is armed again whenever it was done, under clients that ask all the time."""
    rng, measured, salts = random.Random(seed), Measured(), itertools.count()
    async with AsyncClient(system.address, retries=0) as client:

        async def ask(prompt: list[int]) -> tuple[tuple[int, ...], int]:
            options = {**ANSWER, "cache_salt": f"salt {next(salts)}"}
            answer = await client.generate(prompt, timeout_s=TIMEOUT_S, **options)  # type: ignore[arg-type]
            return answer.first.token_ids, answer.timings.retries if answer.timings else 0

        right = [(await ask(prompt))[0] for prompt in PROMPTS]

        async def ask_on(damaging: asyncio.Task[None]) -> None:
            while not damaging.done():
                number = rng.randrange(len(PROMPTS))
                try:
                    ids, retries = await ask(PROMPTS[number])
                except CallFailed as failure:
                    measured.ended[failure.code.name] += 1
                    continue
                measured.ended["exact after a retry" if retries else "exact"] += 1
                if ids != right[number]:
                    measured.failures.append(f"{ids} instead of {right[number]}")

        damaging = asyncio.create_task(_damage(system, wanted, rng, measured))
        try:
            await asyncio.gather(damaging, *(ask_on(damaging) for _ in range(clients)))
        finally:
            damaging.cancel()
    await asyncio.to_thread(system.stack.wait_idle, 30)
    return measured


async def _damage(system: Breakable, wanted: int, rng: random.Random, measured: Measured) -> None:
    """As many frames of each kind, by rounds of one each; which of them, is left to chance.

    A frame that names an earlier grant is missed after ten seconds only. One that breaks off ends the
    connection, and with it the waiting, in the same round.
    """
    for _ in range(-(-wanted // len(KINDS))):
        for point in KINDS.values():
            system.armory.arm(point, "fail", after=rng.randrange(WITHIN * BLOCKS))
        async with asyncio.timeout(2 * TIMEOUT_S):
            while not all(system.armory.taken(point) for point in KINDS.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)  # another process does it
        measured.damaged.update(list(KINDS))


def cost_of_checking() -> Figure:
    """Digests of both ends as a share of the time to the first token, with the bundled model."""
    ttfts, sent = [], 0
    with running_stack("--transport", "tcp") as stack, Client(stack.address) as client:
        for number in range(21):
            prompt = [1 + (7 * number + 13 * at) % 4000 for at in range(COST_LENGTH)]
            answer = client.generate(prompt, max_tokens=1, ignore_eos=True, temperature=0.0)
            assert answer.timings is not None
            ttfts.append(answer.timings.time_to_first_token)
            sent = max(sent, answer.timings.kv_bytes_transferred)
    blocks = -(-COST_LENGTH // 16)
    payload = bytearray(random.Random(0).randbytes(sent // blocks))
    took = []
    for turn in range(200):
        began = time.thread_time()
        for index in range(blocks):
            block_digest(GrantRef(("request", turn), 1, 1), index, payload)
        took.append(time.thread_time() - began)
    checking, ttft = 2 * statistics.median(took), statistics.median(ttfts)
    return Figure(
        "checking, as a share of the time to the first token",
        f"{checking / ttft:.2%} ({1000 * checking:.2f} ms for {sent / 1e6:.1f} MB, of {1000 * ttft:.0f} ms)",
        f"at most {COST_TARGET:.0%}",
        checking / ttft <= COST_TARGET,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.corruptions", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    add_output(parser)
    options = parser.parse_args(argv)
    with breakable_system("--transport", "tcp") as (system, _):
        measured = asyncio.run(run(system, options.count))
    figures = [*measured.figures(), cost_of_checking()]
    return tell(Result("Damaged transfers", figures, failures=measured.failures), options.output)


if __name__ == "__main__":
    sys.exit(main())
