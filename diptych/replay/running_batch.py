"""The streams of a decode worker's steps: when each ends, and when each begins a further block."""

from __future__ import annotations

import heapq

from decode_worker.scheduler import Candidate
from diptych.replay.stream import Stream


class RunningBatch:
    """Streams that run, by place in line, over steps that are counted."""

    def __init__(self, block_size: int) -> None:
        self.streams: dict[int, Stream] = {}
        self.contexts = 0
        """Tokens of all streams."""
        self._block_size = block_size
        self._ends: list[tuple[int, int]] = []  # heap of (step, place in line)
        self._growing = [0] * block_size  # streams by the step, modulo the block size, that needs a block
        self._step = 0  # steps so far
        self._order = 0

    def __len__(self) -> int:
        return len(self.streams)

    @property
    def mean_context(self) -> float:
        """Tokens of a stream on average; 0 without any."""
        return self.contexts / len(self.streams) if self.streams else 0.0

    @property
    def steps_to_end(self) -> int:
        """Steps until the first stream ends."""
        return self._ends[0][0] - self._step

    def admit(self, stream: Stream) -> None:
        """Add a stream at the end of the line."""
        self._order += 1
        stream.order, stream.joined_step = self._order, self._step
        self.streams[stream.order] = stream
        heapq.heappush(self._ends, (self._step + stream.remaining, stream.order))
        # The first token has no keys and values yet: its step writes them.
        stream.tokens = stream.input + stream.made - 1
        self.contexts += stream.tokens
        self._growing[self._phase(stream)] += 1

    def growth(self, steps: int) -> int:
        """Return the blocks that the next `steps` steps take."""
        turns, rest = divmod(steps, self._block_size)
        size, first = self._block_size, self._step % self._block_size
        return turns * len(self.streams) + sum(self._growing[(first + i) % size] for i in range(rest))

    def candidates(self, waiting: int) -> list[Candidate]:
        """Return the schedule's view of the streams, and of `waiting` others behind them."""
        place = self._step % self._block_size
        running = [
            Candidate(one.order, growth=int(self._phase(one) == place)) for one in self.streams.values()
        ]
        return running + [Candidate(self._order + 1 + number) for number in range(waiting)]

    def advance(self, steps: int) -> list[Stream]:
        """Count steps; return the streams that end with them, which leave."""
        self.contexts += len(self.streams) * steps
        self._step += steps
        ended = []
        while self._ends and self._ends[0][0] <= self._step:
            _, order = heapq.heappop(self._ends)
            if order in self.streams:
                ended.append(self.streams[order])
                self._leave(ended[-1])
        return ended

    def remove(self, stream: Stream) -> None:
        """Take a stream out before its end, with the tokens that it made."""
        self._leave(stream)
        self._ends = [end for end in self._ends if end[1] in self.streams]
        heapq.heapify(self._ends)

    def _leave(self, stream: Stream) -> None:
        del self.streams[stream.order]
        made = self._step - stream.joined_step
        self._growing[self._phase(stream)] -= 1
        before = -(-stream.tokens // self._block_size)
        stream.made += made
        stream.tokens += made
        stream.held += -(-stream.tokens // self._block_size) - before
        stream.order = 0
        self.contexts -= stream.tokens

    def _phase(self, stream: Stream) -> int:
        """Return the step, modulo the block size, at which a stream's next token begins a block."""
        return (stream.joined_step - stream.tokens) % self._block_size
