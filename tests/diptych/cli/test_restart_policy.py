"""Delays of restarts, and the silence after which a process is unresponsive."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.cli.restart_policy import LivenessProbe, RestartPolicy, wait_until_unresponsive


def test_restart_delay_doubles_up_to_the_cap() -> None:
    policy = RestartPolicy(first_s=0.5, factor=2, cap_s=3)
    assert [policy.delay_s(failures) for failures in range(1, 6)] == [0.5, 1, 2, 3, 3]


def test_restart_policy_starts_anew_after_a_long_life() -> None:
    policy = RestartPolicy(stable_after_s=30)
    assert policy.failures(5, lived_s=29.9) == 6
    assert policy.failures(5, lived_s=30) == 1


@given(st.integers(1, 10**9))
def test_restart_delay_never_shrinks_and_never_exceeds_the_cap(failures: int) -> None:
    policy = RestartPolicy()
    delays = [policy.delay_s(failures), policy.delay_s(failures + 1), policy.cap_s]
    assert all(one <= next_one for one, next_one in pairwise(delays))


@pytest.mark.parametrize(
    ("answers", "asked"),
    [("...", 3), ("y...", 4), ("..y...", 6), (".y..yy..y...", 12)],
)
async def test_wait_until_unresponsive_counts_failures_in_a_row_only(answers: str, asked: int) -> None:
    said = iter(answers + "y" * 20)
    count = 0

    async def answer() -> bool:
        nonlocal count
        count += 1
        return next(said) == "y"

    async with asyncio.timeout(60):
        await wait_until_unresponsive(answer, LivenessProbe(every_s=0.001, max_failures=3))
    assert count == asked
