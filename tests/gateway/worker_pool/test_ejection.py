"""The ejection of slow workers, and its bound of half a role."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.worker_pool.codec import StepTime
from gateway.worker_pool.ejection import EjectionPolicy, Ejections

POLICY = EjectionPolicy()


def one_class(seconds: float, steps: int = 8, size_class: int = 0) -> list[StepTime]:
    return [StepTime(size_class, steps, seconds)]


def record_load(ejections: Ejections, times: dict[str, float], start: float, end: float) -> None:
    """Record ten reports a second from each worker."""
    for tick in range(round(start * 10), round(end * 10)):
        for worker, seconds in times.items():
            ejections.record(worker, "decode", one_class(seconds), tick / 10)


def test_outlier_is_ejected_after_strikes_s_with_a_reason() -> None:
    ejections = Ejections()
    times = {"a": 0.1, "b": 0.1, "c": 0.5}
    record_load(ejections, times, 0, 0.9)
    assert not ejections.is_ejected("c", 0.9)
    record_load(ejections, times, 0.9, 1.5)
    assert [ejections.is_ejected(w, 1.5) for w in "abc"] == [False, False, True]
    assert "5.0 times as long" in ejections.reason("c", 1.5)
    assert ejections.reason("a", 1.5) == ""


def test_slowness_shorter_than_strikes_s_is_no_reason() -> None:
    ejections = Ejections()
    record_load(ejections, {"a": 0.1, "b": 0.5}, 0, 0.5)
    record_load(ejections, {"a": 0.1, "b": 0.1}, 0.5, 0.7)
    record_load(ejections, {"a": 0.1, "b": 0.5}, 0.7, 1.5)
    assert not ejections.is_ejected("b", 1.5)


def test_slow_report_on_probation_ejects_for_twice_as_long() -> None:
    ejections = Ejections()
    times = {"a": 0.1, "b": 0.5}
    record_load(ejections, times, 0, 1.1)
    back = 1.0 + POLICY.first_s
    assert ejections.is_ejected("b", back - 0.1)
    assert not ejections.is_ejected("b", back)
    assert ejections.reason("b", back).startswith("on probation")
    record_load(ejections, times, back, back + 0.1)
    assert ejections.is_ejected("b", back + 0.1)
    assert ejections.is_ejected("b", back + 2 * POLICY.first_s - 0.1)
    assert not ejections.is_ejected("b", back + 2 * POLICY.first_s)


def test_clean_probation_clears_the_record() -> None:
    ejections = Ejections()
    record_load(ejections, {"a": 0.1, "b": 0.5}, 0, 1.1)
    back = 1.0 + POLICY.first_s
    record_load(ejections, {"a": 0.1, "b": 0.1}, back, back + POLICY.probation_s + 0.2)
    later = back + POLICY.probation_s + 0.2
    assert ejections.reason("b", later) == ""
    record_load(ejections, {"a": 0.1, "b": 0.5}, later, later + 0.5)
    assert not ejections.is_ejected("b", later + 0.5)


def test_incomparable_reports_eject_no_worker() -> None:
    ejections = Ejections()
    for tick in range(30):
        now = tick / 10
        ejections.record("alone", "prefill", one_class(9.0), now)  # the only one of its role
        ejections.record("a", "decode", one_class(0.1, size_class=0), now)
        ejections.record("b", "decode", one_class(0.9, size_class=5), now)  # other sizes
        ejections.record("c", "decode", one_class(0.9, steps=1), now)  # too few
        ejections.record("quick", "decode", one_class(0.0001, size_class=7), now)
        ejections.record("quicker", "decode", one_class(0.00001, size_class=7), now)  # below floor_s
    assert not any(ejections.is_ejected(w, 3.0) for w in ("alone", "a", "b", "c", "quick", "quicker"))


def test_one_normal_size_class_prevents_ejection() -> None:
    ejections = Ejections()
    for tick in range(30):
        ejections.record("a", "decode", [*one_class(0.1), *one_class(0.2, size_class=3)], tick / 10)
        ejections.record("b", "decode", [*one_class(0.9), *one_class(0.2, size_class=3)], tick / 10)
    assert not ejections.is_ejected("b", 3.0)


def test_forget_clears_the_record_of_a_replaced_worker() -> None:
    ejections = Ejections()
    record_load(ejections, {"a": 0.1, "b": 0.5}, 0, 1.1)
    ejections.forget("b")
    assert not ejections.is_ejected("b", 1.2)


@given(
    st.lists(st.tuples(st.sampled_from("abcdefg"), st.sampled_from("pd"), st.floats(0.001, 10)), max_size=300)
)
def test_at_most_half_of_a_role_is_ejected(reports: list[tuple[str, str, float]]) -> None:
    ejections = Ejections()
    known: set[tuple[str, str]] = set()
    for tick, (name, role, seconds) in enumerate(reports):
        now, worker = tick * 0.6, name + role
        known.add((worker, role))
        ejections.record(worker, role, one_class(seconds), now)
        for one in "pd":
            peers = [w for w, r in known if r == one]
            assert 2 * sum(ejections.is_ejected(w, now) for w in peers) <= len(peers)
