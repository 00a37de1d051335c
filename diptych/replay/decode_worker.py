"""A decode worker on virtual time: grants, the real schedule of steps, and steps that only take time.

While every stream of a step runs and grows, the next step has the same streams: the schedule need not be
asked again before one ends, one joins, or blocks run short. Such a run of steps is one event. Streams beyond
a batch wait in order, as the schedule has them do.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from decode_worker.scheduler import Candidate, plan_step
from diptych.replay.events import Events
from diptych.replay.histogram import Histogram
from diptych.replay.pool import Pool
from diptych.replay.shared_cores import SharedCores
from diptych.replay.step_times import StepTimes
from diptych.replay.stream import Stream

OnStream = Callable[[Stream], None]


class SimulatedDecodeWorker:
    """Decode worker on virtual time.

    Args:
        on_granted: is called with a stream that has its blocks, `on_finished` with one that is complete,
            `on_preempted` with one that lost its blocks.
        most_steps: of one event; 1 asks the schedule before each step.
        cores: what it shares with a prefill worker.
    """

    def __init__(
        self,
        events: Events,
        times: StepTimes,
        pool: Pool,
        *,
        max_batch: int,
        block_size: int,
        chunk_tokens: int,
        itl: Histogram,
        on_granted: OnStream,
        on_finished: OnStream,
        on_preempted: OnStream,
        most_steps: int = 1 << 30,
        cores: SharedCores | None = None,
    ) -> None:
        self.pool = pool
        self._events, self._times, self._itl = events, times, itl
        self._max_batch, self._block_size, self._chunk_tokens = max_batch, block_size, chunk_tokens
        self._on_granted, self._on_finished, self._on_preempted = on_granted, on_finished, on_preempted
        self._most_steps, self._cores = most_steps, cores
        if cores is not None:
            cores.on_prefilling = self._change_pace
        self._slowness = 1.0  # of the present run
        self._paused = False
        self._asks: deque[Stream] = deque()
        self._joining: deque[Stream] = deque()  # they wait for a step's end, or for a place in the batch
        self._running: dict[int, Stream] = {}  # by place in line
        self._ends: list[tuple[int, int]] = []  # heap of (step, place in line)
        self._growing = [0] * block_size  # streams by the step, modulo the block size, that needs a block
        self._contexts = 0  # tokens of all running streams
        self._step = 0  # steps so far
        self._order = 0
        self._begun = 0.0
        self._length = 0  # steps of the present run; 0: idle
        self._run = 0  # number of the run, which a shortened one changes
        self.ungranted_blocks = 0  # of prompts that are on their way here
        self.streams = 0  # that this worker has, or is to have
        self.busy_s = self.stream_s = 0.0

    # --- grants ---------------------------------------------------------------------------------------

    def expect(self, stream: Stream) -> None:
        """Count a stream that was sent here."""
        self.streams += 1
        self.ungranted_blocks += self._blocks(stream.tokens)

    def ask(self, stream: Stream) -> None:
        """Grant a stream the blocks of its prompt, now or when they are there."""
        self._asks.append(stream)
        self._grant()

    def _grant(self) -> None:
        while self._asks:
            stream = self._asks[0]
            usable = (stream.tokens - 1) // self._chunk_tokens
            chain = stream.chain[: min(self.pool.cached(stream.chain), usable)]
            cached = len(chain) * self._chunk_tokens
            held = self._blocks(stream.tokens) - cached // self._block_size
            if not self._make_room(self.pool.available_beside(chain) - held):
                return
            self._asks.popleft()
            self.pool.use(chain)
            self.pool.take(held)
            stream.used, stream.held, stream.start, stream.left = chain, held, cached, stream.tokens - cached
            self.ungranted_blocks -= self._blocks(stream.tokens)
            self._on_granted(stream)

    def _make_room(self, left: int) -> bool:
        """Return whether a grant may leave `left` blocks: the run of steps takes its own when it ends.

        The run ends with the present step if what is left is enough for that one only.
        """
        if left < 0 or not self._length or left >= self._growth(self._length):
            return left >= 0
        steps = self._steps_passed()
        if left < self._growth(steps):
            return False
        self._shorten(steps)
        return True

    def publish(self, stream: Stream) -> None:
        """Cache the whole chunks of a prompt that is computed."""
        each = self._chunk_tokens // self._block_size
        used = list(stream.used)
        for chunk in stream.chain[len(used) : stream.tokens // self._chunk_tokens]:
            if not self.pool.publish(chunk):
                break  # two had it computed at a time: this one keeps its copy
            stream.held -= each
            used.append(chunk)
        stream.used = used

    # --- steps ----------------------------------------------------------------------------------------

    def join(self, stream: Stream) -> None:
        """Add a stream with its first token; one without any other leaves at once."""
        if stream.remaining <= 0:
            self._release(stream)
            self._on_finished(stream)
            self._grant()
            return
        self._joining.append(stream)
        if not self._length:
            if not self._paused:
                self._begin()
        elif len(self._running) < self._max_batch:
            self._shorten(self._steps_passed())

    def _steps_passed(self) -> int:
        """Return the steps of the run so far, the present one included."""
        context, passed = self._contexts / len(self._running), self._events.now - self._begun
        return self._times.steps_until(len(self._running), context, passed / self._slowness, self._length)

    def _change_pace(self) -> None:
        """End the run of steps with the present one: the next ones take another time."""
        if self._length:
            self._shorten(self._steps_passed())

    def _shorten(self, steps: int) -> None:
        """End the run of steps after `steps` of them."""
        if steps < self._length:
            self._length = steps
            self._plan_end()

    def _plan_end(self) -> None:
        self._run += 1
        run, batch = self._run, len(self._running)
        seconds = self._slowness * self._times.run_s(batch, self._contexts / batch, self._length)
        self._events.at(self._begun + seconds, lambda: self._end(run, seconds))

    def _begin(self) -> None:
        self._length = 0
        while self._joining and len(self._running) < self._max_batch:
            self._admit(self._joining.popleft())
        while self._running and not self._length:
            steps = min(self._ends[0][0] - self._step, self._most_steps)
            if self._cores is not None:
                self._slowness = self._cores.step_slowness
                steps = 1 if self._cores.backlog else steps
            while steps > 1 and self._growth(steps) > self.pool.available:
                steps //= 2
            if self._most_steps == 1 or self._growth(1) > self.pool.available:
                steps = int(self._obey_schedule())
            if steps:
                self._begun, self._length = self._events.now, steps
                self._plan_end()
        if self._cores is not None:
            self._cores.set_decoding(self._length > 0)
        self._grant()

    def _obey_schedule(self) -> bool:
        """Ask the schedule for a step, and preempt whom it says; return whether all others run."""
        place = self._step % self._block_size
        candidates = [
            Candidate(one.order, growth=int(_phase(one, self._block_size) == place))
            for one in self._running.values()
        ]
        candidates += [Candidate(self._order + 1 + number) for number in range(len(self._joining))]
        plan = plan_step(
            candidates,
            free_blocks=self.pool.available,
            max_batch=self._max_batch,
            grants=0,
            quarantined=0,
        )
        for order in plan.preempt:
            if order in self._running:
                self._preempt(self._running[order])
            else:
                waiting = self._joining.pop()
                self._release(waiting)
                self._on_preempted(waiting)
        return set(plan.run) == self._running.keys() and not plan.preempt

    def _admit(self, stream: Stream) -> None:
        self._order += 1
        stream.order, stream.joined_step = self._order, self._step
        self._running[stream.order] = stream
        heapq.heappush(self._ends, (self._step + stream.remaining, stream.order))
        # The first token has no keys and values yet: its step writes them.
        stream.tokens = stream.input + stream.made - 1
        self._contexts += stream.tokens
        self._growing[_phase(stream, self._block_size)] += 1

    def _growth(self, steps: int) -> int:
        """Return the blocks that the next `steps` steps take."""
        turns, rest = divmod(steps, self._block_size)
        size, first = self._block_size, self._step % self._block_size
        return turns * len(self._running) + sum(self._growing[(first + i) % size] for i in range(rest))

    def _end(self, run: int, seconds: float) -> None:
        if run != self._run:
            return  # it was shortened
        steps, batch = self._length, len(self._running)
        pause_s = 0.0 if self._cores is None else self._cores.pause_s(seconds / steps)
        self.pool.take(self._growth(steps))
        self._itl.add((seconds + pause_s) / steps, batch * steps)
        self.busy_s += seconds
        self.stream_s += batch * seconds
        self._contexts += batch * steps
        self._step += steps
        self._length = 0
        while self._ends and self._ends[0][0] <= self._step:
            _, order = heapq.heappop(self._ends)
            if order in self._running:
                stream = self._running[order]
                self._leave(stream)
                self._release(stream)
                self._on_finished(stream)
        if pause_s and self._running and self._cores is not None:
            self._paused = True
            self._cores.set_decoding(False)
            self._events.at(self._events.now + pause_s, self._resume)
            self._grant()
        else:
            self._begin()

    def _resume(self) -> None:
        self._paused = False
        self._begin()

    def _leave(self, stream: Stream) -> None:
        """Take a stream out of the batch, with the tokens that it made there."""
        del self._running[stream.order]
        made = self._step - stream.joined_step
        self._growing[_phase(stream, self._block_size)] -= 1
        before = self._blocks(stream.tokens)
        stream.made += made
        stream.tokens += made
        stream.held += self._blocks(stream.tokens) - before
        stream.order = 0
        self._contexts -= stream.tokens

    def _preempt(self, stream: Stream) -> None:
        self._leave(stream)
        self._ends = [end for end in self._ends if end[1] in self._running]
        heapq.heapify(self._ends)
        self._release(stream)
        self._on_preempted(stream)

    def _release(self, stream: Stream) -> None:
        self.streams -= 1
        self.pool.leave(stream.used)
        self.pool.give_back(stream.held)
        stream.used, stream.held = (), 0

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)


def _phase(stream: Stream, size: int) -> int:
    """Return the step, modulo the block size, at which a stream's next token begins a block."""
    return (stream.joined_step - stream.tokens) % size
