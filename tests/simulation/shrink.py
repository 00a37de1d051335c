"""The search for the shortest scenario that still fails, without as many faults and requests as possible.

Delta debugging. Source: Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input" (2002).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tests.simulation.run import Outcome, simulate
from tests.simulation.scenario import Scenario

Item = TypeVar("Item")


def shrink(scenario: Scenario, *, most_runs: int = 300) -> Scenario:
    """Return a scenario that no longer fails without any single one of its faults and requests.

    Any violation counts as the failure: a shorter scenario with another one is as good.
    """
    runs = 0

    def fails(candidate: Scenario) -> bool:
        nonlocal runs
        runs += 1
        return runs <= most_runs and bool(simulate(candidate).violation)

    while True:
        before = scenario
        scenario = _without(scenario, "faults", fails)
        scenario = _without(scenario, "requests", fails)
        if scenario == before or runs > most_runs:
            return scenario


def _without(scenario: Scenario, name: str, fails: Callable[[Scenario], bool]) -> Scenario:
    """Return the scenario with as few of its `name` as it takes to fail."""

    def keeping(items: Sequence[object]) -> Scenario:
        changed: dict[str, Any] = {name: tuple(items)}
        return replace(scenario, **changed)

    return keeping(minimised(getattr(scenario, name), lambda items: fails(keeping(items))))


def minimised(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """Return a 1-minimal sublist of `items` that still fails; the whole list is known to."""
    kept, parts = list(items), 2
    if kept and fails([]):
        return []
    while len(kept) >= 2:
        size = -(-len(kept) // parts)
        for begin in range(0, len(kept), size):
            without = kept[:begin] + kept[begin + size :]
            if fails(without):
                kept, parts = without, max(parts - 1, 2)
                break
        else:
            if parts >= len(kept):
                break
            parts = min(parts * 2, len(kept))
    return kept


def explain(seed: int, scenario: Scenario) -> str:
    """Return a report on a failing seed: the shortest scenario and its trace."""
    short = shrink(scenario)
    outcome: Outcome = simulate(short, keep_trace=True)
    lines = [
        f"seed {seed}: {outcome.violation}",
        f"{short.gateways} gateways, {short.prefills} prefill workers, decode workers {short.decodes}",
        "requests:",
        *(f"  {plan}" for plan in short.requests),
        "faults:",
        *(f"  {fault}" for fault in short.faults),
        "trace:",
        *(f"  {line}" for line in outcome.trace),
        f"replay: python -m tests.simulation --seed {seed}",
    ]
    return "\n".join(lines)
