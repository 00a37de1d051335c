"""Simulated systems whose model has recurrent layers: faults change no token, and planted mistakes do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from decode_worker.window_rows import WindowRows
from diptych.engine.batch import SequenceStep
from diptych.engine.kv import window_prefix
from tests.simulation import scenario
from tests.simulation.campaign import Summary
from tests.simulation.model import ENTRY, SimulatedRunner, _state
from tests.simulation.run import simulate
from tests.simulation.scenario import make_scenario
from tests.simulation.shrink import explain

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def all_are_recurrent(monkeypatch: Patch) -> None:
    """Let every scenario without groups and tiers have recurrent layers."""
    monkeypatch.setattr(scenario, "WINDOWED_SHARE", 0.0)
    monkeypatch.setattr(scenario, "RECURRENT_SHARE", 1.0)


@pytest.mark.parametrize("seeds", [6, pytest.param(300, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
def test_seeds_of_recurrent_models_violate_no_invariant(seeds: int) -> None:
    summary, recurrent = Summary(), 0
    for seed in range(seeds):
        made = make_scenario(seed, "everything")
        recurrent += made.recurrent
        outcome = simulate(made)
        if outcome.violation:
            pytest.fail(explain(seed, made), pytrace=False)
        summary.add(seed, outcome)
    assert recurrent > seeds // 4
    assert summary.ends["ok"] > seeds


def states_take_a_token_twice(patch: Patch) -> None:
    """A step that was computed leaves its last token in the state once more."""

    def write(self: SimulatedRunner, sequence: SequenceStep, entries: bytearray) -> None:
        real(self, sequence, entries)
        last = len(entries) // ENTRY - 1
        for table in sequence.window_tables:
            _state(sequence, table, last)[:] = bytes(reversed(entries[-ENTRY:]))

    real = SimulatedRunner.write
    patch.setattr(SimulatedRunner, "write", write)


def states_of_the_own_place_are_read(patch: Patch) -> None:
    """A sequence goes on from the page of its place, also where the token before lies in another one."""

    def read(self: SimulatedRunner, sequence: SequenceStep) -> bytearray:
        entries = real(self, sequence)
        if sequence.window_tables and sequence.start:
            entries[-ENTRY:] = _state(sequence, sequence.window_tables[0], sequence.start)
        return entries

    real = SimulatedRunner.read
    patch.setattr(SimulatedRunner, "read", read)


def pages_are_not_copied(patch: Patch) -> None:
    """Copy-on-write copies the full block of a place alone."""
    patch.setattr(WindowRows, "own", lambda self, sequence, place, writable: None)


def hits_ignore_pages(patch: Patch) -> None:
    """A cached prefix is used though the page at its end is gone."""
    patch.setattr(window_prefix, "usable_places", lambda keys, end, reach, holds: end)


@pytest.mark.parametrize(
    ("plant", "theme_name", "within"),
    [
        (states_take_a_token_twice, "everything", 10),
        (states_of_the_own_place_are_read, "everything", 10),
        (pages_are_not_copied, "crowd", 30),
        pytest.param(hits_ignore_pages, "pulls", 40, marks=pytest.mark.full),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_planted_mistake_is_found(
    plant: Callable[[Patch], None], theme_name: str, within: int, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    found = (seed for seed in range(within) if simulate(make_scenario(seed, theme_name)).violation)
    assert next(found, None) is not None, f"{within} seeds do not show it"
