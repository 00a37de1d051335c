"""The phase times of one choice over its attempts."""

from __future__ import annotations

from gateway.attempt.phase_times import PhaseReports, PhaseTimes


def test_total_uses_own_reports_and_other_choices_prefill() -> None:
    reports = PhaseReports()
    reports.record(1, 0, PhaseTimes(prefill=2.0))
    reports.record(1, 0, PhaseTimes(prefill=2.0, decode=5.0))  # the later report replaces the first
    reports.record(2, 1, PhaseTimes(prefill=1.0, decode=3.0, kv_bytes_transferred=7))
    assert reports.total(0, [1]) == PhaseTimes(prefill=2.0, decode=5.0)
    assert reports.total(1, [1, 2]) == PhaseTimes(prefill=3.0, decode=3.0, kv_bytes_transferred=7)
    assert reports.total(2, [3]) == PhaseTimes()


def test_early_report_counts_until_another_arrives() -> None:
    reports = PhaseReports()
    reports.record(1, 0, PhaseTimes(prefill=2.0), early=True)
    assert reports.total(0, [1]) == PhaseTimes(prefill=2.0)
    whole = PhaseTimes(prefill=2.0, kv_receive=0.5, decode=5.0)
    reports.record(1, 0, whole)
    reports.record(1, 0, PhaseTimes(prefill=2.0), early=True)  # late
    assert reports.total(0, [1]) == whole
