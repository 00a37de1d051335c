from hypothesis import given
from hypothesis import strategies as st

from diptych.cli.worker_specs import ThreadPlan, split_cores


def test_split_cores_gives_one_each_of_two() -> None:
    assert split_cores(2, 1, 1) == ThreadPlan((1,), (1,))


def test_split_cores_gives_the_odd_core_to_prefill() -> None:
    assert split_cores(7, 1, 2) == ThreadPlan((3,), (2, 2))


@given(st.integers(1, 256), st.integers(1, 16), st.integers(1, 16))
def test_every_worker_has_a_thread_and_no_core_is_idle_or_shared_without_need(
    cores: int, prefill: int, decode: int
) -> None:
    plan = split_cores(cores, prefill, decode)
    shares = [*plan.prefill, *plan.decode]
    assert (len(plan.prefill), len(plan.decode)) == (prefill, decode)
    assert sum(shares) == max(cores, prefill + decode)
    assert max(shares) - min(shares) <= 1


def test_every_worker_has_cores_of_its_own_to_lend() -> None:
    assert ThreadPlan((1,), (1,)).homes(2) == ((range(1),), (range(1, 2),))
    assert ThreadPlan((3,), (2, 2)).homes(7) == ((range(3),), (range(3, 5), range(5, 7)))


def test_workers_that_outnumber_the_cores_lend_none() -> None:
    assert ThreadPlan((1, 1), (1,)).homes(2) is None
