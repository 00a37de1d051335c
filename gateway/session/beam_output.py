"""The outputs of a beam search: each of them is of use as a whole only.

A worker says them once the search is over, in pieces. When it dies between two pieces, another search begins
at the prompt again: it cannot go on at a token, and half an output that was delivered would be in its way.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.attempt.worker_events import DecodeFinished, TokensArrived
from gateway.worker_pool.codec import LinkEvent


class BeamOutput:
    """What came of outputs that are not complete."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[int, int], list[LinkEvent]] = {}  # by attempt and choice

    def complete(self, news: Sequence[LinkEvent]) -> list[LinkEvent]:
        """What there is to act on: pieces wait for the word that their output has finished."""
        heard: list[LinkEvent] = []
        for item in news:
            name = item.attempt, item.choice
            if isinstance(item.event, TokensArrived):
                self._pieces.setdefault(name, []).append(item)
                continue
            if isinstance(item.event, DecodeFinished):
                heard += self._pieces.pop(name, ())
            heard.append(item)
        return heard
