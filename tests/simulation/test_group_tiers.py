"""Tiers of workers of several processes: seeds of the simulation, and bugs planted in what ranks exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diptych.worker_process.group.orders import ReadShare
from diptych.worker_process.group.remote_rank import RemoteRank
from tests.simulation.campaign import Summary
from tests.simulation.run import simulate
from tests.simulation.scenario import make_scenario
from tests.simulation.shrink import explain
from tests.simulation.test_planted_bugs import (
    loaded_blocks_are_granted_before_they_are_copied,
    step_ends_with_rank_0,
)
from tests.simulation.themes import TIERED_GROUPS, TIERED_SHARES, Theme

Patch = pytest.MonkeyPatch
FULL = (pytest.mark.full, pytest.mark.timeout(900))


@pytest.mark.parametrize("theme", [TIERED_GROUPS, TIERED_SHARES], ids=["one memory", "shares"])
@pytest.mark.parametrize("seeds", [4, pytest.param(200, marks=FULL)])
def test_seeds_of_groups_with_tiers_violate_no_invariant(theme: Theme, seeds: int) -> None:
    summary = Summary()
    for seed in range(seeds):
        scenario = make_scenario(seed, theme=theme)
        assert scenario.grouped
        assert scenario.tiers
        outcome = simulate(scenario)
        if outcome.violation:
            pytest.fail(explain(seed, scenario), pytrace=False)
        summary.add(seed, outcome)
    assert summary.ends["ok"] > 4 * seeds
    assert summary.faults.total() > 4 * seeds
    assert summary.loaded > 3 * seeds, "tiers were not used"


def loaded_shares_stay_in_rank_0(patch: Patch) -> None:
    """Other ranks do not get their share of a block that was loaded."""
    patch.setattr(RemoteRank, "write_share", lambda self, number, block, payload: None)


def shares_are_gathered_before_they_are_written(patch: Patch) -> None:
    """A rank gives its share of a block to be stored as it is, whatever it was to write before."""

    def at_once(number: int, block: int, after: int) -> ReadShare:
        return ReadShare(number, block, 0)

    patch.setattr("diptych.worker_process.group.remote_rank.ReadShare", at_once)


PLANTED: list[Any] = [
    pytest.param(step_ends_with_rank_0, TIERED_GROUPS, 20, marks=FULL),
    pytest.param(loaded_blocks_are_granted_before_they_are_copied, TIERED_GROUPS, 20, marks=FULL),
    (loaded_shares_stay_in_rank_0, TIERED_SHARES, 20),
    pytest.param(shares_are_gathered_before_they_are_written, TIERED_SHARES, 200, marks=FULL),
]


@pytest.mark.parametrize(
    ("plant", "theme", "within"), PLANTED, ids=lambda value: getattr(value, "__name__", "")
)
def test_planted_bug_is_found(
    plant: Callable[[Patch], None], theme: Theme, within: int, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    found = (seed for seed in range(within) if simulate(make_scenario(seed, theme=theme)).violation)
    assert next(found, None) is not None, f"{within} seeds do not show it"
