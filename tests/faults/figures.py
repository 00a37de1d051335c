"""What a campaign of faults measured, and how it is said: one table on the terminal or in a file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from diptych.bench.cpu_time import CpuTime
from diptych.bench.figures import percentile

_BEGAN = CpuTime.now()  # of the command


@dataclass(frozen=True)
class Figure:
    """One measured value. `met` is None where there is no target."""

    what: str
    measured: str
    target: str = "–"
    met: bool | None = None

    def row(self) -> str:
        verdict = {True: "met", False: "MISSED", None: ""}[self.met]
        return f"| {self.what} | {self.measured} | {self.target} | {verdict} |"


@dataclass(frozen=True)
class Result:
    """What one command has to say."""

    title: str
    figures: Sequence[Figure]
    body: str = ""  # markdown: tables of its own, failures in full
    failures: Sequence[str] = field(default_factory=tuple)

    @property
    def ok(self) -> bool:
        """Nothing was wrong; figures of time may still be missed."""
        return not self.failures

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", "| figure | measured | target | |", "|---|---|---|---|"]
        lines += [figure.row() for figure in self.figures]
        if self.body:
            lines += ["", self.body]
        if self.failures:
            lines += ["", "Failures:", *(f"- {failure}" for failure in self.failures)]
        return "\n".join(lines) + "\n"


def seconds(what: str, values: Sequence[float], percent: float, target_s: float) -> Figure:
    """A percentile of times against a bound."""
    measured = percentile(sorted(values), percent)
    text = f"{1000 * measured:.0f} ms ({len(values)} samples)" if values else "no samples"
    return Figure(what, text, f"at most {1000 * target_s:.0f} ms", bool(values) and measured <= target_s)


def count(what: str, found: int, wanted: int) -> Figure:
    """A number that has one right value."""
    return Figure(what, str(found), str(wanted), found == wanted)


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, help="append the result to this file as markdown")


def tell(result: Result, output: Path | None) -> int:
    """Print it, append it to a file if there is one; the exit status.

    Beside it: how much of the machine the hypervisor gave to other guests. Tails are theirs as much as ours.
    """
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    below = f"{when}, {os.cpu_count()} cores, load average {load}, {_BEGAN.stolen_till_now()}."
    text = f"{result.markdown()}\n{below}\n"
    print(f"\n{text}", flush=True)
    if output is not None:
        with output.open("a") as file:
            file.write(f"{text}\n")
    return 0 if result.ok else 1
