"""A campaign of many seeds over some processes, and its summary."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch

from tests.simulation.cluster import served_model
from tests.simulation.run import Outcome, simulate
from tests.simulation.scenario import make_scenario

PORTION = 25
"""Seeds that a process takes at a time."""


@dataclass
class Summary:
    """Counts over all runs."""

    seeds: int = 0
    events: int = 0
    messages: int = 0
    tokens: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    loaded: int = 0
    damaged: int = 0
    shares: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[int, str]] = field(default_factory=list)

    def add(self, seed: int, outcome: Outcome) -> None:
        self.seeds += 1
        self.events += outcome.events
        self.messages += outcome.messages
        self.tokens += outcome.tokens
        self.virtual_s += outcome.seconds
        self.loaded += outcome.loaded
        self.damaged += outcome.damaged
        self.shares += outcome.shares
        self.faults.update(outcome.faults)
        self.ends.update(outcome.ends)
        self.retries.update(outcome.retries)
        if outcome.violation:
            self.violations.append((seed, outcome.violation))

    def merge(self, other: Summary) -> None:
        for name in (
            "seeds",
            "events",
            "messages",
            "tokens",
            "virtual_s",
            "cpu_s",
            "loaded",
            "damaged",
            "shares",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.faults.update(other.faults)
        self.ends.update(other.ends)
        self.retries.update(other.retries)
        self.violations = sorted([*self.violations, *other.violations])

    def table(self) -> str:
        """Return a Markdown table for people and for lab/results."""
        rows = [
            ("seeds", f"{self.seeds:,}"),
            ("events", f"{self.events:,}"),
            ("messages between processes, heartbeats included", f"{self.messages:,}"),
            ("faults that met something", f"{self.faults.total():,}: {_counts(self.faults)}"),
            ("requests", f"{self.ends.total():,}: {_counts(self.ends)}"),
            ("tokens delivered, each compared with the oracle", f"{self.tokens:,}"),
            ("blocks loaded from tiers, entries found damaged", f"{self.loaded:,}, {self.damaged:,}"),
            ("shares of blocks that ranks sent to ranks", f"{self.shares:,}"),
            ("attempts retried", f"{self.retries.total():,}: {_counts(self.retries)}"),
            ("simulated time", f"{self.virtual_s / 3600:.1f} h"),
            ("CPU time", f"{self.cpu_s:.0f} s, {1000 * self.cpu_s / max(self.seeds, 1):.0f} ms a seed"),
            ("wall time", f"{self.wall_s:.0f} s"),
            ("**violations**", f"**{len(self.violations)}**"),
        ]
        return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common())


def prepare() -> None:
    """Build what every run needs, and exclude it from garbage collection."""
    torch.set_num_threads(1)
    os.environ.setdefault("OTEL_SDK_DISABLED", "true")
    served_model()
    gc.collect()
    gc.freeze()


def run_seeds(seeds: Iterable[int], theme: str | None = None) -> Summary:
    """Run these seeds in this process, all of one theme if one is named."""
    summary, started = Summary(), time.process_time()
    for seed in seeds:
        summary.add(seed, simulate(make_scenario(seed, theme)))
    summary.cpu_s = time.process_time() - started
    return summary


def campaign(
    first: int, count: int, *, jobs: int, progress: Callable[[Summary], None], theme: str | None = None
) -> Summary:
    """Run `count` seeds from `first` on over `jobs` processes; `progress` is called after each portion."""
    total, started = Summary(), time.perf_counter()
    portions = [range(n, min(n + PORTION, first + count)) for n in range(first, first + count, PORTION)]
    with multiprocessing.get_context("spawn").Pool(jobs, prepare) as pool:
        for summary in pool.imap_unordered(partial(run_seeds, theme=theme), portions):
            total.merge(summary)
            total.wall_s = time.perf_counter() - started
            progress(total)
    return total
