"""TTFT of a chat's second turn on idle systems, by where its blocks and its computing are.

    python -m lab.second_turns [--chats 40] [--systems "in place" "tcp"]

The systems run at once and are asked by turns, one chat at a time. Over tcp a prefill worker pulls the first
turn's blocks from the decode worker, unless it is told never to; with local prefill the decode worker itself
computes the few new tokens. Ratios are of the medians, to the first system.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import uvloop

from diptych.client import AsyncClient
from lab.copied_prefixes import System, Turn, second_turn, started

PLACE, TCP = ("--transport", "shared_memory"), ("--transport", "tcp")
REMOTE, LOCAL = ("--set", "gateway.local-prefill=never"), ("--set", "gateway.local-prefill=auto")
SYSTEMS = {
    "in place": (*PLACE, *REMOTE),
    "in place, local": (*PLACE, *LOCAL),
    "tcp": (*TCP, *REMOTE),
    "tcp, local": (*TCP, *LOCAL),
    "tcp, not pulled": (*TCP, *REMOTE, "--set", "prefill.pull-prefixes=never"),
}


async def by_turns(systems: dict[str, System], chats: int) -> dict[str, list[Turn]]:
    """Hold so many chats on each system, one after the other; the first of each is not counted."""
    found: dict[str, list[Turn]] = {name: [] for name in systems}
    clients = {name: AsyncClient(system.address) for name, system in systems.items()}
    try:
        for number in range(chats + 1):
            names = list(systems) if number % 2 else list(systems)[::-1]
            for name in names:
                turn = await second_turn(clients[name], random.Random(number))
                if number:
                    found[name].append(turn)
    finally:
        await asyncio.gather(*(client.close() for client in clients.values()))
    return found


def table(found: dict[str, list[Turn]]) -> str:
    """Return a Markdown table, with ratios to the first system."""
    base = statistics.median(turn.ttft_s for turn in next(iter(found.values())))
    rows = ["| second turn | tokens | cached | TTFT p50, ms | p90, ms | ratio |", "|---|---|---|---|---|---|"]
    for name, turns in found.items():
        times = sorted(turn.ttft_s for turn in turns)
        middle = statistics.median(times)
        cached = min(turn.cached_tokens for turn in turns)
        slow = times[len(times) * 9 // 10]
        rows.append(
            f"| {name} | {turns[0].prompt_tokens} | {cached} | {1e3 * middle:.1f} | {1e3 * slow:.1f} |"
            f" {middle / base:.2f} |"
        )
    return "\n".join(rows)


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m lab.second_turns", description=__doc__)
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--prefill-workers", type=int, default=2)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    options = parser.parse_args(argv)
    workers = ("--prefill-workers", str(options.prefill_workers))
    with ExitStack() as stack:
        systems = {name: stack.enter_context(started([*workers, *SYSTEMS[name]])) for name in options.systems}
        found = uvloop.run(by_turns(systems, options.chats))
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
