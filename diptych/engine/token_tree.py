"""Trees of tokens, each of which follows another one. Pure, and without torch: settings are checked by it."""

from __future__ import annotations

from collections.abc import Sequence


def depths(parents: Sequence[int]) -> list[int]:
    """Return how many ancestors each node of a tree has; `parents` as in `SequenceStep`."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found
