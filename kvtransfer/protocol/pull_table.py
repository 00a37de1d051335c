"""State machine of a prefill worker's pulls from one decode process: no I/O, no clock.

A pull takes blocks of a grant's prefix from the decode worker's pool to blocks of scratch. Phases:

    OPEN      blocks are on their way
    COMPLETE  all have arrived and were verified
    CUT       no more comes: it was refused, a block was damaged, or the channel broke
    ENDED     its owner has taken the result; nothing is copied for it any more

A frame is copied only if its grant's generation has an open pull that still lacks its index. So data that
comes late, twice or for another grant touches nothing, and scratch is free again once the pull has ended.
What counts are the leading blocks: the rest of a pull that was cut is computed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from kvtransfer.protocol.messages import GrantRef


class PullPhase(enum.Enum):
    """Phase of a pull, as listed at the head of this file."""

    OPEN = "open"
    COMPLETE = "complete"
    CUT = "cut"
    ENDED = "ended"


TRANSITIONS: dict[PullPhase, frozenset[PullPhase]] = {
    PullPhase.OPEN: frozenset({PullPhase.COMPLETE, PullPhase.CUT, PullPhase.ENDED}),
    PullPhase.COMPLETE: frozenset({PullPhase.ENDED}),
    PullPhase.CUT: frozenset({PullPhase.ENDED}),
    PullPhase.ENDED: frozenset(),
}


class Pull:
    """Pull of the blocks of one grant from index `first` of its table on, into `block_ids` of scratch.

    `source_ids` are the blocks in the decode worker's pool.
    `settled` is called once, when no more blocks come or are needed.
    """

    def __init__(
        self,
        ref: GrantRef,
        first: int,
        source_ids: Sequence[int],
        block_ids: Sequence[int],
        settled: Callable[[], None],
    ) -> None:
        self.ref, self.first = ref, first
        self.source_ids, self.block_ids = tuple(source_ids), tuple(block_ids)
        self.phase = PullPhase.OPEN
        self._missing = set(range(first, first + len(self.block_ids)))
        self._settled = settled

    @property
    def leading(self) -> int:
        """Number of blocks that arrived before the first one that is missing."""
        return min(self._missing, default=self.first + len(self.block_ids)) - self.first

    def destination(self, index: int) -> int | None:
        """Return the block for this index; None if it is not expected, or not any more."""
        if self.phase is not PullPhase.OPEN or index not in self._missing:
            return None
        return self.block_ids[index - self.first]

    def arrived(self, index: int) -> None:
        """Record a verified block at its destination."""
        self._missing.discard(index)
        if not self._missing and self.phase is PullPhase.OPEN:
            self.move(PullPhase.COMPLETE)

    def cut(self) -> None:
        """Record that no more comes; a no-op unless the pull is open."""
        if self.phase is PullPhase.OPEN:
            self.move(PullPhase.CUT)

    def move(self, phase: PullPhase) -> None:
        """Change the phase. Raises RuntimeError for a transition that is not in TRANSITIONS."""
        if phase not in TRANSITIONS[self.phase]:
            raise RuntimeError(f"a pull cannot go from {self.phase.value} to {phase.value}")
        self.phase = phase
        if phase in (PullPhase.COMPLETE, PullPhase.CUT):
            self._settled()


class PullTable:
    """Open pulls by slot and generation of their grants."""

    def __init__(self) -> None:
        self._pulls: dict[tuple[int, int], Pull] = {}

    def __len__(self) -> int:
        return len(self._pulls)

    def open(
        self,
        ref: GrantRef,
        first: int,
        source_ids: Sequence[int],
        block_ids: Sequence[int],
        settled: Callable[[], None],
    ) -> Pull:
        """Open a pull. Raises ValueError if the grant has one, or for no blocks."""
        name = ref.slot, ref.generation
        if name in self._pulls or not block_ids:
            raise ValueError("a pull of no blocks, or the second one of a grant")
        self._pulls[name] = pull = Pull(ref, first, source_ids, block_ids, settled)
        return pull

    def find(self, slot: int, generation: int) -> Pull | None:
        """Return the pull of this very generation of a slot, None without one."""
        return self._pulls.get((slot, generation))

    def end(self, pull: Pull) -> None:
        """End a pull, whatever its phase: nothing is copied for it from here on."""
        del self._pulls[pull.ref.slot, pull.ref.generation]
        pull.move(PullPhase.ENDED)

    def cut_all(self) -> None:
        """Cut every open pull: the channel broke."""
        for pull in list(self._pulls.values()):
            pull.cut()
