"""Seeds of the simulation, replayed and shortened. `make simulate SEEDS=10000` is the long form."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.simulation.campaign import Summary
from tests.simulation.run import simulate
from tests.simulation.scenario import make_scenario
from tests.simulation.shrink import explain, minimised
from tests.simulation.themes import HOSTED

SEEDS = 80
REPLAYED = range(5000, 5005)


def test_seeds_violate_no_invariant() -> None:
    summary = Summary()
    for seed in range(SEEDS):
        scenario = make_scenario(seed)
        outcome = simulate(scenario)
        if outcome.violation:
            pytest.fail(explain(seed, scenario), pytrace=False)
        summary.add(seed, outcome)
    assert summary.ends["ok"] > SEEDS, "too few requests ended well: the runs show nothing"
    assert summary.faults.total() > 2 * SEEDS
    assert summary.loaded > SEEDS, "tiers were not used"
    assert summary.damaged > 0


@pytest.mark.parametrize("seeds", [8, pytest.param(400, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
def test_seeds_of_processes_with_two_workers_violate_no_invariant(seeds: int) -> None:
    summary = Summary()
    for seed in range(seeds):
        scenario = make_scenario(seed, theme=HOSTED)
        outcome = simulate(scenario)
        if outcome.violation:
            pytest.fail(explain(seed, scenario), pytrace=False)
        summary.add(seed, outcome)
    assert summary.ends["ok"] > seeds
    assert summary.faults.total() > seeds


def test_seed_has_one_trace_in_two_processes() -> None:
    """The other process has another string hash, other addresses, and a longer id."""
    here = [simulate(make_scenario(seed)).digest for seed in REPLAYED]
    script = (
        "import os\n"
        "os.getpid = lambda: 1 << 21\n"
        "from tests.simulation.run import simulate\n"
        "from tests.simulation.scenario import make_scenario\n"
        f"for seed in {REPLAYED!r}: print(simulate(make_scenario(seed)).digest)"
    )
    root = Path(__file__).parents[2]
    there = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.split() == here
    assert [simulate(make_scenario(seed), keep_trace=True).digest for seed in REPLAYED] == here


@pytest.mark.full
@pytest.mark.timeout(600)
def test_seed_has_one_trace_in_a_hundred_runs() -> None:
    for seed in (5011, 5012):
        assert len({simulate(make_scenario(seed)).digest for _ in range(100)}) == 1


def test_minimised_keeps_a_minimal_failing_sublist() -> None:
    tried: list[list[int]] = []

    def fails(items: Sequence[int]) -> bool:
        tried.append(list(items))
        return {3, 11} <= set(items)

    assert minimised(list(range(16)), fails) == [3, 11]
    assert len(tried) < 60
    assert minimised([1, 2, 3], lambda items: True) == []
