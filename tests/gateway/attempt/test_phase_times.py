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


def test_what_the_prefill_worker_says_early_counts_until_anything_else_is_said() -> None:
    book = PhaseBook()
    book.note(1, 0, Phases(prefill=2.0), early=True)
    assert book.of(0, [1]) == Phases(prefill=2.0)
    whole = Phases(prefill=2.0, kv_receive=0.5, decode=5.0)
    book.note(1, 0, whole)
    book.note(1, 0, Phases(prefill=2.0), early=True)  # on its way for long
    assert book.of(0, [1]) == whole
