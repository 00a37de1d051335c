"""A decode worker on virtual time: grants, the real schedule of steps, and steps that only take time.

While every stream of a step runs and grows, the next step has the same streams: the schedule need not be
asked again before one ends, one joins, or blocks run short. Such a run of steps is one event. Streams beyond
a batch wait in order, as the schedule has them do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from decode_worker.local_schedule import LocalBounds
from decode_worker.scheduler import plan_step
from diptych.replay.events import Events
from diptych.replay.histogram import Histogram
from diptych.replay.local_prompts import Chunks, LocalPrompts
from diptych.replay.pool import Pool
from diptych.replay.running_batch import RunningBatch
from diptych.replay.shared_cores import SharedCores
from diptych.replay.step_times import StepTimes
from diptych.replay.stream import Stream

OnStream = Callable[[Stream], None]


class SimulatedDecodeWorker:
    """Decode worker on virtual time.

    Args:
        on_granted: is called with a stream that has its blocks, `on_finished` with one that is complete,
            `on_preempted` with one that lost its blocks, `on_prefilled` with one whose prompt was computed
            here, `on_too_many` with one of which too many tokens are new for that.
        local: the most tokens of prompts that are computed here, in steps of their own or beside streams.
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
        on_prefilled: OnStream,
        on_too_many: OnStream,
        local: LocalBounds,
        most_steps: int = 1 << 30,
        cores: SharedCores | None = None,
    ) -> None:
        self.pool = pool
        self._events, self._times, self._itl = events, times, itl
        self._max_batch, self._block_size, self._chunk_tokens = max_batch, block_size, chunk_tokens
        self._on_granted, self._on_finished, self._on_preempted = on_granted, on_finished, on_preempted
        self._on_prefilled, self._on_too_many = on_prefilled, on_too_many
        self.local = LocalPrompts(local)
        self._chunks: Chunks = []  # of the present step
        self._plain_s = 0.0  # length of the last step without any
        self._most_steps, self._cores = most_steps, cores
        if cores is not None:
            cores.on_prefilling = self._change_pace
        self._slowness = 1.0  # of the present run
        self._paused = False
        self._asks: deque[Stream] = deque()
        self._joining: deque[Stream] = deque()  # they wait for a step's end, or for a place in the batch
        self._batch = RunningBatch(block_size)
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

    def compute(self, stream: Stream, predicted: int) -> None:
        """Queue a prompt that is computed here, of which `predicted` tokens seem to be new."""
        self.local.add(stream, predicted)
        self._ask_for_local()

    def _ask_for_local(self) -> None:
        self._asks.extend(self.local.asking())
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
            if stream.prefill is None and not self.local.grant(stream):
                self._release(stream)
                self._on_too_many(stream)
                continue
            self._on_granted(stream)
            if stream.prefill is None:
                # Not at once: this may be an answer to an ask that is being made.
                self._events.at(self._events.now, self._wake)

    def _make_room(self, left: int) -> bool:
        """Return whether a grant may leave `left` blocks: the run of steps takes its own when it ends.

        The run ends with the present step if what is left is enough for that one only.
        """
        if left < 0 or not self._length or left >= self._batch.growth(self._length):
            return left >= 0
        steps = self._steps_passed()
        if left < self._batch.growth(steps):
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
        if not self._length or len(self._batch) < self._max_batch:
            self._wake()

    def _wake(self) -> None:
        """Begin a step, or end the run of steps with the present one: there is more to compute."""
        if self._length:
            self._shorten(self._steps_passed())
        elif not self._paused:
            self._begin()

    def _steps_passed(self) -> int:
        """Return the steps of the run so far, the present one included."""
        if self._length == 1:
            return 1
        batch, passed = self._batch, self._events.now - self._begun
        return self._times.steps_until(len(batch), batch.mean_context, passed / self._slowness, self._length)

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
        run, batch = self._run, len(self._batch)
        chunks = [(tokens, stream.tokens - stream.left) for stream, tokens in self._chunks]
        seconds = self._times.chunk_s(chunks, beside=batch > 0)
        if batch:
            seconds += self._times.run_s(batch, self._batch.mean_context, self._length)
        seconds *= self._slowness
        self._events.at(self._begun + seconds, lambda: self._end(run, seconds))

    def _begin(self) -> None:
        self._length = 0
        while self._joining and len(self._batch) < self._max_batch:
            self._batch.admit(self._joining.popleft())
        self._chunks = self._plan_chunks()
        while (self._batch or self._chunks) and not self._length:
            steps = 1 if self._chunks else min(self._batch.steps_to_end, self._most_steps)
            if self._cores is not None:
                self._slowness = self._cores.step_slowness
                steps = 1 if self._cores.backlog else steps
            while steps > 1 and self._batch.growth(steps) > self.pool.available:
                steps //= 2
            if self._batch and (self._most_steps == 1 or self._batch.growth(1) > self.pool.available):
                steps = int(self._obey_schedule())
            if steps:
                self._begun, self._length = self._events.now, steps
                self._plan_end()
        if self._cores is not None:
            self._cores.set_decoding(self._length > 0)
        self._ask_for_local()

    def _plan_chunks(self) -> Chunks:
        slack_s = 0.0 if self._cores is None else self._cores.pause_s(self._plain_s)
        return self.local.plan(len(self._batch), slack_s)

    def _obey_schedule(self) -> bool:
        """Ask the schedule for a step, and preempt whom it says; return whether all others run."""
        running = self._batch.streams
        plan = plan_step(
            self._batch.candidates(len(self._joining)),
            free_blocks=self.pool.available,
            max_batch=self._max_batch,
            grants=0,
            quarantined=0,
        )
        for order in plan.preempt:
            if order in running:
                preempted = running[order]
                self._batch.remove(preempted)
            else:
                preempted = self._joining.pop()
            self._release(preempted)
            self._on_preempted(preempted)
        return set(plan.run) == running.keys() and not plan.preempt

    def _end(self, run: int, seconds: float) -> None:
        if run != self._run:
            return  # it was shortened
        steps, batch = self._length, len(self._batch)
        pause_s = self._pause_s(seconds / steps, sum(tokens for _, tokens in self._chunks), batch)
        self.pool.take(self._batch.growth(steps))
        self._itl.add((seconds + pause_s) / steps, batch * steps)
        self.busy_s += seconds
        self.stream_s += batch * seconds
        self._length = 0
        computed = self.local.take(self._chunks)
        self._chunks = []
        for stream in computed:
            self._on_prefilled(stream)
        for stream in self._batch.advance(steps):
            self._release(stream)
            self._on_finished(stream)
        if pause_s and self._batch and self._cores is not None:
            self._paused = True
            self._cores.set_decoding(False)
            self._events.at(self._events.now + pause_s, self._resume)
            self._grant()
        else:
            self._begin()

    def _pause_s(self, step_s: float, chunk_tokens: int, batch: int) -> float:
        """Record the length of a step, and return the pause after it.

        Chunks of prompts take the place of a part of the pause (`StepPacing.end`).
        """
        self.local.budget.record(step_s, chunk_tokens, alone=not batch)
        if not chunk_tokens:
            self._plain_s = step_s
        if self._cores is None:
            return 0.0
        return max(self._plain_s + self._cores.pause_s(self._plain_s) - step_s, 0.0)

    def _resume(self) -> None:
        self._paused = False
        self._begin()

    def _release(self, stream: Stream) -> None:
        self.streams -= 1
        self.pool.leave(stream.used)
        self.pool.give_back(stream.held)
        stream.used, stream.held = (), 0

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
