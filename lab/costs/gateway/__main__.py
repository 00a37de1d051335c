"""`python -m lab.costs.gateway`: start each system, measure its APIs, print and write the tables."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

import lab.costs.gateway as package
from diptych.bench.cpu_time import CpuTime
from lab.costs.gateway.measure import APIS, Sample, by_turns
from lab.costs.gateway.report import markdown
from lab.costs.gateway.systems import SYSTEMS


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    tables = []
    for system in options.system or list(SYSTEMS):
        before = CpuTime.now()
        samples = uvloop.run(_measured(system, options))
        load = f"{options.streams} streams of {options.tokens} tokens"
        tables.append(markdown(samples, f"`{system}`: {load}, {os.cpu_count()} cores"))
        tables[-1] += f"\n\n{before.stolen_till_now()}"
        print(tables[-1], end="\n\n", flush=True)
    if options.output is not None:
        options.output.write_text("\n\n".join(tables) + "\n")
    return 0


async def _measured(system: str, options: argparse.Namespace) -> list[Sample]:
    async with SYSTEMS[system](options.step / 1000) as target:
        return await by_turns(
            target,
            options.api or list(APIS),
            streams=options.streams,
            tokens=options.tokens,
            rounds=options.rounds,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m lab.costs.gateway",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--system", action="append", choices=SYSTEMS, help="default: both")
    add("--api", action="append", choices=APIS, help="default: all")
    add("--streams", type=int, default=16, help="requests at a time")
    add("--tokens", type=int, default=256, help="of each answer")
    add("--step", type=float, default=15.0, help="milliseconds between two tokens of played workers")
    add("--rounds", type=int, default=3)
    add("--output", type=Path, metavar="MD", help="write the tables here as well")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
