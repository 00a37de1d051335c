"""Prefixes where blocks are copied: what the router promised, what was cached, what was computed again.

    python -m lab.copied_prefixes [--requests 10000] [--prefill-workers 2] [--transport tcp] [--clients 8]

First the turns of some chats: the prompt of a second turn is the first one, its answer and a question. Then a
load of prompts that share prefixes. Promised and cached tokens are the gateway's counters, by pair; tokens
computed again are those of a shared prefix that some request had computed to its end before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from diptych.client import AsyncClient
from diptych.runtime.python_module import module_command

START_S, STOP_S = 300.0, 60.0
PUBLISHED_S = 0.5
"""Seconds after which the gateways know what a worker has cached."""
PROMPT, ANSWER, QUESTION = 40, 300, 19
PREFIX, LONGEST_TAIL, OUTPUT = 400, 40, 4
FIRST_ID, LAST_ID = 1000, 40_000  # of the bundled model's vocabulary, without special tokens
_SAMPLE = re.compile(r"^diptych_route_pair_(predicted|cached)_tokens_total\{(.*)\} (\S+)$")


@dataclass(frozen=True)
class System:
    """A running system: addresses of its gateway."""

    address: str
    http_port: int


@dataclass(frozen=True)
class Turn:
    """An answer: its cached prompt tokens, the client's time to its first token, and its output."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    output: list[int]


@dataclass
class Findings:
    """Cached tokens of the second turns, and of the load."""

    turns: list[tuple[int, int]] = field(default_factory=list)
    """(tokens of the prompt, tokens cached) of each second turn."""
    pairs: dict[str, list[float]] = field(default_factory=dict)
    """[promised, cached] tokens by pair."""
    shared: int = 0
    """Tokens of prefixes that had been computed before."""
    computed_again: int = 0
    """Number of them that were not cached."""

    @property
    def kept(self) -> float:
        """Share of the promised tokens that were cached, over all pairs, what is beyond a promise aside."""
        promised = sum(one for one, _ in self.pairs.values())
        return sum(min(pair) for pair in self.pairs.values()) / promised if promised else 1.0

    @property
    def again(self) -> float:
        """Share of the shared tokens that were computed again."""
        return self.computed_again / self.shared if self.shared else 0.0

    def table(self) -> str:
        """Return a Markdown table."""
        rows = [
            *((f"second turn of {tokens} tokens: cached", str(cached)) for tokens, cached in self.turns),
            *(
                (f"{pair}: promised, cached tokens", f"{promised:.0f}, {cached:.0f}")
                for pair, (promised, cached) in sorted(self.pairs.items())
            ),
            ("cached of the promised tokens", f"{self.kept:.2%}"),
            ("computed again of the shared tokens", f"{self.again:.2%}"),
        ]
        return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


async def measure(system: System, *, chats: int, requests: int, families: int, clients: int) -> Findings:
    """Send the chats, then the load, and read the gateway's counters."""
    rng, findings = random.Random(1), Findings()
    async with AsyncClient(system.address) as client:
        for _ in range(chats):
            turn = await second_turn(client, rng)
            findings.turns.append((turn.prompt_tokens, turn.cached_tokens))
        prefixes = [random_tokens(rng, PREFIX) for _ in range(families)]
        await _load(client, rng, prefixes, requests, clients, findings)
    findings.pairs = _read_pairs(system)
    return findings


async def second_turn(client: AsyncClient, rng: random.Random) -> Turn:
    """Hold a chat of two turns and return the second one."""
    prompt = random_tokens(rng, PROMPT)
    first = await generate(client, prompt, ANSWER)
    await asyncio.sleep(PUBLISHED_S)
    return await generate(client, [*prompt, *first.output, *random_tokens(rng, QUESTION)], OUTPUT)


async def _load(
    client: AsyncClient,
    rng: random.Random,
    prefixes: Sequence[list[int]],
    requests: int,
    clients: int,
    findings: Findings,
) -> None:
    """Send prompts with these prefixes, so many at a time; each prefix has been computed alone before."""
    for prefix in prefixes:
        await generate(client, [*prefix, *random_tokens(rng, 1)], 1)
    await asyncio.sleep(PUBLISHED_S)
    turn = asyncio.Semaphore(clients)

    async def one(prompt: list[int]) -> None:
        async with turn:
            asked = await generate(client, prompt, OUTPUT)
        findings.shared += PREFIX
        findings.computed_again += max(0, PREFIX - asked.cached_tokens)

    prompts = [
        [*rng.choice(prefixes), *random_tokens(rng, rng.randint(1, LONGEST_TAIL))] for _ in range(requests)
    ]
    await asyncio.gather(*map(one, prompts))


async def generate(client: AsyncClient, prompt: list[int], tokens: int) -> Turn:
    """Ask for so many tokens, with the cache that all prompts of this module share."""
    began, ttft_s = time.perf_counter(), 0.0
    stream = client.stream(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True, cache_salt="pairs")
    output: list[int] = []
    cached = 0
    async for chunk in stream:
        if chunk.token_ids and not output:
            ttft_s = time.perf_counter() - began
        output += chunk.token_ids
        if chunk.usage is not None:
            cached = chunk.usage.cached_prompt_tokens
    return Turn(len(prompt), cached, ttft_s, output)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    """Draw ordinary tokens of the bundled model."""
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(count)]


def _read_pairs(system: System) -> dict[str, list[float]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{system.http_port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    pairs: dict[str, list[float]] = {}
    for line in lines:
        if found := _SAMPLE.match(line):
            what, pair, value = found.groups()
            pairs.setdefault(pair.replace('"', ""), [0.0, 0.0])[what == "cached"] = float(value)
    return pairs


@contextmanager
def started(flags: Sequence[str]) -> Iterator[System]:
    """Run `diptych up` with these flags on free ports."""
    with tempfile.TemporaryDirectory(prefix="diptych-pairs-") as folder:
        ready = Path(folder, "ready.json")
        command = [*module_command("diptych"), "up", "--ready-file", str(ready), "--log-level", "error"]
        command += ["--grpc-port", "0", "--http-port", "0", *flags]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
            try:
                deadline = time.monotonic() + START_S
                while not ready.exists():
                    if child.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"diptych up does not serve; its status is {child.returncode}")
                    time.sleep(0.1)
                gateway = json.loads(ready.read_text())["gateway"]
                yield System(f"127.0.0.1:{gateway['grpc_port']}", gateway["http_port"])
            finally:
                child.terminate()
                child.wait(STOP_S)


def main(argv: Sequence[str]) -> int:
    """Print the table; return 1 where fewer tokens were cached than promised, or too many computed again."""
    parser = argparse.ArgumentParser(prog="python -m lab.copied_prefixes", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--chats", type=int, default=4)
    parser.add_argument("--families", type=int, default=16, help="prefixes of the load")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prefill-workers", type=int, default=2)
    parser.add_argument("--transport", default="tcp")
    parser.add_argument(
        "--local-prefill", default="never", help="of the gateway: who computes few new tokens"
    )
    arguments = parser.parse_args(argv)
    flags = ["--prefill-workers", str(arguments.prefill_workers), "--transport", arguments.transport]
    flags += ["--set", f"gateway.local-prefill={arguments.local_prefill}"]
    with started(flags) as system:
        findings = uvloop.run(
            measure(
                system,
                chats=arguments.chats,
                requests=arguments.requests,
                families=arguments.families,
                clients=arguments.clients,
            )
        )
    print(findings.table())
    return int(findings.kept < 0.99 or findings.again > 0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
