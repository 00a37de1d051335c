"""Phases of one choice over its attempts, from what the workers reported of it or of its neighbours."""

from __future__ import annotations

from gateway.attempt.phase_times import PhaseBook, Phases


def test_a_choice_has_its_own_reports_and_its_neighbours_prefill() -> None:
    book = PhaseBook()
    book.note(1, 0, Phases(prefill=2.0))
    book.note(1, 0, Phases(prefill=2.0, decode=5.0))  # the last word replaces the first
    book.note(2, 1, Phases(prefill=1.0, decode=3.0, kv_bytes_transferred=7))
    assert book.of(0, [1]) == Phases(prefill=2.0, decode=5.0)
    assert book.of(1, [1, 2]) == Phases(prefill=3.0, decode=3.0, kv_bytes_transferred=7)
    assert book.of(2, [3]) == Phases()
