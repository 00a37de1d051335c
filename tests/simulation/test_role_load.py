"""Roles that follow a load which turns from prompts to long answers and back. `-s` prints the figures."""

from tests.simulation.role_load import STEADY, TURNING, Fleet


def test_goodput_of_a_turning_load_is_a_fifth_more_with_auto_roles() -> None:
    for seed in range(3):
        fixed = Fleet(TURNING, auto_roles=False, seed=seed).run()
        auto = Fleet(TURNING, auto_roles=True, seed=seed).run()
        print(
            f"\nseed {seed}: in time {fixed.good} without, {auto.good} with {auto.changes} changes: "
            f"{auto.good / fixed.good:.2f}"
        )
        assert auto.good >= 1.2 * fixed.good
        assert 2 <= auto.changes <= 12


def test_steady_load_changes_no_role() -> None:
    fleet = Fleet(STEADY, auto_roles=True, seed=0).run()
    assert fleet.changes == 0
    assert fleet.lost == 0
