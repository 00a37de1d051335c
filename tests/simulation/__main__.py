"""`python -m tests.simulation --seeds 10000`: many simulated clusters with faults, and what they violated.

`--seed N` replays one, shortens it if it fails, and prints its trace.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import date
from pathlib import Path

from tests.simulation.campaign import Summary, campaign, prepare
from tests.simulation.run import simulate
from tests.simulation.scenario import make_scenario
from tests.simulation.shrink import explain
from tests.simulation.themes import THEMES

SHOWN = 3
"""Failing seeds that are explained; the others are named."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    parser.add_argument("--seed", type=int, help="only this one, with its trace")
    parser.add_argument("--theme", choices=list(THEMES), help="all scenarios of this theme, not of any")
    parser.add_argument(
        "--output", type=Path, nargs="?", const=_results(), help="write the summary there too"
    )
    options = parser.parse_args(argv)
    if options.seed is not None:
        return _one(options.seed, options.theme)
    progress, theme = _progress(options.seeds), options.theme
    summary = campaign(options.first, options.seeds, jobs=options.jobs, progress=progress, theme=theme)
    print(f"\n\n{summary.table()}\n")
    if options.output is not None:
        options.output.write_text(_report(summary, options.first, options.jobs))
        print(f"written to {options.output}")
    _explain(summary, theme)
    return 1 if summary.violations else 0


def _one(seed: int, theme: str | None) -> int:
    prepare()
    scenario = make_scenario(seed, theme)
    outcome = simulate(scenario, keep_trace=True)
    if outcome.violation:
        print(explain(seed, scenario))
        return 1
    print("\n".join(outcome.trace))
    print(f"seed {seed}: no violation; trace {outcome.digest}")
    return 0


def _explain(summary: Summary, theme: str | None) -> None:
    if summary.violations:
        prepare()
    for seed, _ in summary.violations[:SHOWN]:
        print(explain(seed, make_scenario(seed, theme)), end="\n\n")
    for seed, violation in summary.violations[SHOWN:]:
        print(f"seed {seed}: {violation}")


def _progress(seeds: int):  # type: ignore[no-untyped-def]
    def show(summary: Summary) -> None:
        line = (
            f"\r{summary.seeds:,} of {seeds:,} seeds, {summary.faults.total():,} faults, "
            f"{len(summary.violations)} violations, {summary.wall_s:.0f} s"
        )
        print(line, end="", file=sys.stderr, flush=True)

    return show


def _results() -> Path:
    folder = Path(__file__).parents[2] / "lab" / "results"
    return folder / f"{date.today().isoformat()}-simulation.md"


def _report(summary: Summary, first: int, jobs: int) -> str:
    return (
        "# Deterministic simulation\n\n"
        f"`make simulate SEEDS={summary.seeds}` (first seed {first}, {jobs} processes). The real gateway, "
        "prefill and decode programs on virtual time;\ntests/simulation/ says what is simulated and what is "
        f"checked after every event.\n\n{summary.table()}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
