from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from diptych.cli.restart_policy import RestartPolicy


def test_doubles_up_to_the_cap() -> None:
    policy = RestartPolicy(first_s=0.5, factor=2, cap_s=3)
    assert [policy.delay_s(failures) for failures in range(1, 6)] == [0.5, 1, 2, 3, 3]


def test_a_long_life_forgives_what_was_before() -> None:
    policy = RestartPolicy(stable_after_s=30)
    assert policy.failures(5, lived_s=29.9) == 6
    assert policy.failures(5, lived_s=30) == 1


@given(st.integers(1, 10**9))
def test_never_waits_longer_than_the_cap_nor_less_than_before(failures: int) -> None:
    policy = RestartPolicy()
    delays = [policy.delay_s(failures), policy.delay_s(failures + 1), policy.cap_s]
    assert all(one <= next_one for one, next_one in pairwise(delays))
