"""Who is slow is left out for a while, but never so many that nobody is left."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.worker_pool.codec import StepTime
from gateway.worker_pool.ejection import EjectionPolicy, Ejections

POLICY = EjectionPolicy()


def one_class(seconds: float, steps: int = 8, size_class: int = 0) -> list[StepTime]:
    return [StepTime(size_class, steps, seconds)]


def reported(ejections: Ejections, times: dict[str, float], start: float, end: float) -> None:
    """Every worker reports several times a second."""
    for tick in range(round(start * 10), round(end * 10)):
        for worker, seconds in times.items():
            ejections.report(worker, "decode", one_class(seconds), tick / 10)


def test_an_outlier_is_ejected_after_a_while_and_says_why() -> None:
    ejections = Ejections()
    times = {"a": 0.1, "b": 0.1, "c": 0.5}
    reported(ejections, times, 0, 0.9)
    assert not ejections.ejected("c", 0.9)
    reported(ejections, times, 0.9, 1.5)
    assert [ejections.ejected(w, 1.5) for w in "abc"] == [False, False, True]
    assert "5.0 times as long" in ejections.reason("c", 1.5)
    assert ejections.reason("a", 1.5) == ""


def test_one_slow_moment_is_forgiven() -> None:
    ejections = Ejections()
    reported(ejections, {"a": 0.1, "b": 0.5}, 0, 0.5)
    reported(ejections, {"a": 0.1, "b": 0.1}, 0.5, 0.7)
    reported(ejections, {"a": 0.1, "b": 0.5}, 0.7, 1.5)
    assert not ejections.ejected("b", 1.5)


def test_on_probation_one_slow_report_is_enough_and_the_next_time_is_longer() -> None:
    ejections = Ejections()
    times = {"a": 0.1, "b": 0.5}
    reported(ejections, times, 0, 1.1)
    back = 1.0 + POLICY.first_s
    assert ejections.ejected("b", back - 0.1)
    assert not ejections.ejected("b", back)
    assert ejections.reason("b", back).startswith("on probation")
    reported(ejections, times, back, back + 0.1)
    assert ejections.ejected("b", back + 0.1)
    assert ejections.ejected("b", back + 2 * POLICY.first_s - 0.1)
    assert not ejections.ejected("b", back + 2 * POLICY.first_s)


def test_a_clean_probation_clears_the_record() -> None:
    ejections = Ejections()
    reported(ejections, {"a": 0.1, "b": 0.5}, 0, 1.1)
    back = 1.0 + POLICY.first_s
    reported(ejections, {"a": 0.1, "b": 0.1}, back, back + POLICY.probation_s + 0.2)
    later = back + POLICY.probation_s + 0.2
    assert ejections.reason("b", later) == ""
    reported(ejections, {"a": 0.1, "b": 0.5}, later, later + 0.5)
    assert not ejections.ejected("b", later + 0.5)


def test_what_cannot_be_compared_is_no_reason() -> None:
    ejections = Ejections()
    for tick in range(30):
        now = tick / 10
        ejections.report("alone", "prefill", one_class(9.0), now)  # nobody else of its role
        ejections.report("a", "decode", one_class(0.1, size_class=0), now)
        ejections.report("b", "decode", one_class(0.9, size_class=5), now)  # other sizes
        ejections.report("c", "decode", one_class(0.9, steps=1), now)  # too few
        ejections.report("quick", "decode", one_class(0.0001, size_class=7), now)
        ejections.report("quicker", "decode", one_class(0.00001, size_class=7), now)  # nobody feels it
    assert not any(ejections.ejected(w, 3.0) for w in ("alone", "a", "b", "c", "quick", "quicker"))


def test_a_class_that_speaks_for_it_saves_it() -> None:
    ejections = Ejections()
    for tick in range(30):
        ejections.report("a", "decode", [*one_class(0.1), *one_class(0.2, size_class=3)], tick / 10)
        ejections.report("b", "decode", [*one_class(0.9), *one_class(0.2, size_class=3)], tick / 10)
    assert not ejections.ejected("b", 3.0)


def test_who_comes_back_as_another_process_has_no_record() -> None:
    ejections = Ejections()
    reported(ejections, {"a": 0.1, "b": 0.5}, 0, 1.1)
    ejections.forget("b")
    assert not ejections.ejected("b", 1.2)


@given(
    st.lists(st.tuples(st.sampled_from("abcdefg"), st.sampled_from("pd"), st.floats(0.001, 10)), max_size=300)
)
def test_never_more_than_half_of_a_role(reports: list[tuple[str, str, float]]) -> None:
    ejections = Ejections()
    known: set[tuple[str, str]] = set()
    for tick, (name, role, seconds) in enumerate(reports):
        now, worker = tick * 0.6, name + role
        known.add((worker, role))
        ejections.report(worker, role, one_class(seconds), now)
        for one in "pd":
            fellows = [w for w, r in known if r == one]
            assert 2 * sum(ejections.ejected(w, now) for w in fellows) <= len(fellows)
