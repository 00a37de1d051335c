"""Prompts that a decode worker on virtual time computes itself: the real schedule of asks and chunks."""

from __future__ import annotations

from collections.abc import Sequence

from decode_worker.local_schedule import ChunkBudget, LocalBounds, QueuedPrompt, plan_asks, plan_chunks
from diptych.replay.stream import Stream

Chunks = Sequence[tuple[Stream, int]]
"""Prompts of a step, with the tokens that it computes of each."""


class LocalPrompts:
    """Prompts of one decode worker, in order of arrival: queued, asked for, granted."""

    def __init__(self, bounds: LocalBounds) -> None:
        self.bounds = bounds
        self.budget = ChunkBudget(bounds.chunk)
        self._queued: dict[int, QueuedPrompt] = {}
        self._asked: dict[int, QueuedPrompt] = {}
        self._granted: dict[int, Stream] = {}
        self._streams: dict[int, Stream] = {}
        self._arrived = 0

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def waiting_tokens(self) -> int:
        """Tokens still to compute, as the worker reports them."""
        waiting = sum(one.tokens for one in (*self._queued.values(), *self._asked.values()))
        return waiting + sum(stream.left for stream in self._granted.values())

    def add(self, stream: Stream, expected: int) -> None:
        """Queue a prompt, of which `expected` tokens seem to be new."""
        self._arrived += 1
        stream.order = self._arrived
        self._streams[stream.order] = stream
        self._queued[stream.order] = QueuedPrompt(stream.order, expected)

    def asking(self) -> list[Stream]:
        """Return the prompts that ask for blocks now."""
        if not self._queued:
            return []
        holding = [*self._asked.values(), *self._entries()]
        asks = plan_asks(list(self._queued.values()), holding, self.bounds.idle_chunk)
        for number in asks:
            self._asked[number] = self._queued.pop(number)
        return [self._streams[number] for number in asks]

    def grant(self, stream: Stream) -> bool:
        """Take a prompt that has its blocks; False if more of its tokens are new than are computed here."""
        del self._asked[stream.order]
        if stream.left > self.bounds.short:
            del self._streams[stream.order]
            return False
        self._granted[stream.order] = stream
        return True

    def plan(self, running: int, slack_s: float) -> Chunks:
        """Return the chunks of the next step, beside `running` streams and with pauses of `slack_s`."""
        if not self._granted:
            return []
        budget = self.budget.tokens(slack_s) if running else self.bounds.idle_chunk
        return [(self._granted[number], tokens) for number, tokens in plan_chunks(self._entries(), budget)]

    def take(self, chunks: Chunks) -> list[Stream]:
        """Count chunks as computed, and return the prompts that are complete."""
        done = []
        for stream, tokens in chunks:
            stream.left -= tokens
            if not stream.left:
                del self._granted[stream.order], self._streams[stream.order]
                done.append(stream)
        return done

    def _entries(self) -> list[QueuedPrompt]:
        return [QueuedPrompt(number, stream.left) for number, stream in self._granted.items()]
