"""Two tables: both rates and their ratios, and whose time a token takes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lab.costs.service.measure import EVENT_LOOP, OTHERS, Round
from lab.spread import median_and_range, stolen_in_turns

TARGET = 0.9
_LEAST_US = 1.0


def markdown(rounds: Sequence[Round], title: str) -> str:
    """Medians over the rounds (smallest–largest)."""
    return "\n".join(
        [
            f"{title}; medians of {len(rounds)} rounds, both in each (smallest–largest).",
            "",
            "| | output tokens/s |",
            "|---|---|",
            f"| bare engine | {median_and_range([one.bare for one in rounds], 0)} |",
            f"| whole system | {median_and_range([one.service for one in rounds], 0)} |",
            f"| of the bare engine's, target ≥ {TARGET} | {_spread(rounds, 'ratio')} |",
            f"| the same without the load generator's CPU time | {_spread(rounds, 'ratio_elsewhere')} |",
            "",
            f"| CPU µs a token | {EVENT_LOOP} | {OTHERS} |",
            "|---|---|---|",
            *_parts(rounds),
            "",
            stolen_in_turns([one.steal_share for one in rounds]),
        ]
    )


def _spread(rounds: Sequence[Round], name: str) -> str:
    return median_and_range([getattr(one, name) for one in rounds], 2)


def _parts(rounds: Sequence[Round]) -> list[str]:
    """Render a line a process, but for those that take next to nothing."""
    processes = dict.fromkeys(process for one in rounds for process, _ in one.cpu_s)
    lines = []
    for process in processes:
        used = [
            1e6 * statistics.median(one.cpu_s.get((process, threads), 0.0) for one in rounds)
            for threads in (EVENT_LOOP, OTHERS)
        ]
        if sum(used) >= _LEAST_US:
            lines.append(f"| {process} | {used[0]:.0f} | {used[1]:.0f} |")
    return lines
