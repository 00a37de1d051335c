"""The replay of a trace: requests arrive at the real admission queue and router, on virtual time.

arrival -> admission queue -> router -> prefill worker -> first token -> decode worker -> end
                                ^  +-> the decode worker itself -^          |
                                |                                preempted |
                                +------------------------------------------+
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from decode_worker.local_schedule import LocalBounds
from diptych.bench.datasets.traces import TraceRow
from diptych.replay.decode_worker import SimulatedDecodeWorker
from diptych.replay.events import Events
from diptych.replay.fleet import BLOCK_SIZE, CHUNK_TOKENS, ReplayFleet, ServiceGoal
from diptych.replay.local_choice import LocalChoice
from diptych.replay.pool import Pool
from diptych.replay.prefill_worker import SimulatedPrefillWorker
from diptych.replay.prefix_index import ReplayedIndex
from diptych.replay.result import ReplayResult
from diptych.replay.routing import Chooser
from diptych.replay.shared_cores import SharedCores
from diptych.replay.stream import Stream
from diptych.runtime.errors import DeadlineUnattainable, QueueFull
from gateway.admission.capacity import Capacity
from gateway.admission.gate import AdmissionGate
from gateway.admission.queue import AdmissionQueue
from gateway.admission.wait import MaxQueueDelay
from gateway.worker_pool.candidates import DecodeCandidate, PrefillCandidate
from gateway.worker_pool.local_prefill import HANDOFF_S
from gateway.worker_pool.pair_savings import most_saved_tokens
from gateway.worker_pool.registry import PREFILLING_SEQUENCES
from gateway.worker_pool.router import RouteRequest

QUEUED_TOKENS = 400_000
"""Tokens that may wait, for each prefill worker: the gateway's default, which is for one."""
QUEUE_DELAY_S = 120.0
"""Longest predicted wait, the gateway's default."""
PROGRESS_REQUESTS = 500
_BLOCKS_OF_CHUNK = CHUNK_TOKENS // BLOCK_SIZE


class Replay:
    """Replay of one trace on one fleet.

    Args:
        progress: is called with the number of requests that have arrived, every few hundred of them.
    """

    def __init__(
        self, fleet: ReplayFleet, goal: ServiceGoal, progress: Callable[[int], None] = lambda arrived: None
    ) -> None:
        self.result = ReplayResult(fleet)
        self._fleet, self._goal, self._progress = fleet, goal, progress
        self._events = Events()
        self._index = ReplayedIndex(self._events, fleet.index_delay_s)
        self._chooser = Chooser(fleet.routing)
        self._local = (
            LocalChoice(fleet.local, fleet.times, fleet.prefill_chunk) if fleet.local is not None else None
        )
        self._gate = _admission(fleet, lambda: self._events.now)
        times, pairs = fleet.times, min(fleet.prefill, fleet.decode)
        self.cores = [
            SharedCores(times.prompts_beside, times.steps_beside)
            if times.share_cores and number < pairs
            else None
            for number in range(max(fleet.prefill, fleet.decode))
        ]
        """Machines: that of the first prefill and the first decode worker, and so on; None: apart."""
        self._prefill = [
            SimulatedPrefillWorker(
                self._events,
                times,
                self,
                self._prefilled,
                fleet.prefill_chunk,
                fleet.prefill_enough or fleet.prefill_chunk,
                self.cores[number],
            )
            for number in range(fleet.prefill)
        ]
        self._decode = [self._decode_worker(number) for number in range(fleet.decode)]
        # Where blocks are copied each worker is a memory of its own; else all compute in one.
        self._copies = bool(fleet.times.pull_s)
        self._pull_cost = fleet.times.pull_cost

    def _decode_worker(self, number: int) -> SimulatedDecodeWorker:
        fleet = self._fleet
        return SimulatedDecodeWorker(
            self._events,
            fleet.times,
            Pool(fleet.blocks, _BLOCKS_OF_CHUNK, partial(self._index.record, number)),
            max_batch=fleet.max_batch,
            block_size=BLOCK_SIZE,
            chunk_tokens=CHUNK_TOKENS,
            itl=self.result.itl,
            on_granted=self._granted,
            on_finished=self._finished,
            on_preempted=self._preempted,
            on_prefilled=self._locally_prefilled,
            on_too_many=self._too_many_new,
            local=LocalBounds(0, 0) if fleet.local is None else fleet.local,
            most_steps=fleet.most_steps,
            cores=self.cores[number],
        )

    def run(self, requests: Iterable[TraceRow]) -> ReplayResult:
        """Replay requests, which are in order of time, until the last one has its answer."""
        for number, row in enumerate(requests):
            self._events.run_until(row.arrival_s)
            self._arrive(number, row)
            if number % PROGRESS_REQUESTS == 0:
                self._progress(number)
        while self._events.step():
            pass
        result, seconds = self.result, max(self.result.last_s, 1e-9)
        result.prefill_busy = sum(w.busy_s for w in self._prefill) / seconds / len(self._prefill)
        busy = sum(w.busy_s for w in self._decode)
        result.decode_busy = busy / seconds / len(self._decode)
        result.mean_batch = sum(w.stream_s for w in self._decode) / busy if busy else 0.0
        self._progress(result.requests)
        return result

    def invariants(self) -> None:
        """Raise AssertionError unless all requests are gone and all blocks are back."""
        self._gate.queue.invariants()
        answered = self.result.completed + self.result.refused + self.result.too_long
        assert answered == self.result.requests, "requests were lost"
        for worker in self._decode:
            worker.pool.invariants(0)
            assert not worker.streams, "a worker waits for streams"
            assert not worker.ungranted_blocks, "a worker waits for prompts"
            assert not worker.local, "a worker has prompts of its own"
        assert not any(worker.outstanding for worker in self._prefill), "a worker waits for prompts"

    # --- the gateway ----------------------------------------------------------------------------------

    def _arrive(self, number: int, row: TraceRow) -> None:
        result, fleet = self.result, self._fleet
        result.requests += 1
        result.last_arrival_s = self._events.now
        output = max(row.output_len, 1)
        needed = row.input_len + output
        if needed > min(fleet.max_tokens, fleet.blocks * BLOCK_SIZE):
            result.too_long += 1
            return
        chain = row.blocks[: row.input_len // CHUNK_TOKENS]
        stream = Stream(number, self._events.now, row.input_len, output, chain, tokens=row.input_len)
        hits = self._index.hits(chain) if chain else {}
        saved = most_saved_tokens(stream.tokens, *self._candidates(hits)) if hits else 0
        try:
            stream.ticket = self._gate.enter(
                max(row.input_len - saved, 1),
                max_tokens=fleet.max_tokens - row.input_len,
                priority=0,
                time_left_s=None,
                on_admitted=lambda choices: self._route(stream),
            )
        except (QueueFull, DeadlineUnattainable):
            result.refused += 1
            return
        result.input_tokens += row.input_len

    def _route(self, stream: Stream) -> None:
        hits = self._index.hits(stream.chain) if stream.chain else {}
        # The first token has to come out of the prompt: of a wholly cached one the last chunk is computed.
        usable = (stream.tokens - 1) // CHUNK_TOKENS
        true = {
            number: min(worker.pool.cached(stream.chain), usable)
            for number, worker in enumerate(self._decode)
            if stream.chain
        }
        request = RouteRequest(
            str(stream.number),
            stream.tokens,
            min(stream.tokens + stream.remaining, self._fleet.max_tokens),
            remote=stream.remote,
        )
        prefill, decode = self._candidates(hits)
        local = None
        if self._local is not None:
            waiting = [worker.local.waiting_tokens for worker in self._decode]
            local = partial(self._local.choose, request, decode=decode, waiting_tokens=waiting)
        stream.prefill, stream.decode = self._chooser.choose(request, prefill, decode, true, local)
        if not stream.made:
            self.result.best_cached_tokens += max(true.values(), default=0) * CHUNK_TOKENS
        self._decode[stream.decode].expect(stream)
        predicted = stream.tokens - min(hits.get(stream.decode, 0), usable) * CHUNK_TOKENS
        if stream.prefill is None:
            self._decode[stream.decode].compute(stream, predicted)
        else:
            self._prefill[stream.prefill].dispatch(stream, predicted)

    def _candidates(self, hits: dict[int, int]) -> tuple[list[PrefillCandidate], list[DecodeCandidate]]:
        copies, fleet = self._copies, self._fleet
        prefill = [
            PrefillCandidate(
                f"p{number}",
                "",
                worker.outstanding,
                memory_domain=f"p{number}" if copies else "",
                pull_cost=self._pull_cost,
            )
            for number, worker in enumerate(self._prefill)
        ]
        decode = [
            DecodeCandidate(
                f"d{number}",
                "",
                block_size=BLOCK_SIZE,
                max_tokens=fleet.max_tokens,
                free_blocks=max(worker.pool.available - worker.ungranted_blocks, 0),
                sequences=worker.streams,
                cached_blocks=hits.get(number, 0) * _BLOCKS_OF_CHUNK,
                memory_domain=f"d{number}" if copies else "",
            )
            for number, worker in enumerate(self._decode)
        ]
        return prefill, decode

    # --- events of the workers ------------------------------------------------------------------------

    def ask(self, stream: Stream) -> None:
        """Ask the stream's decode worker for its blocks (`Granter`)."""
        self._decode[stream.decode].ask(stream)

    def _granted(self, stream: Stream) -> None:
        if not stream.made:
            self.result.cached_tokens += stream.start
        if stream.prefill is not None:
            self._prefill[stream.prefill].granted(stream)

    def _prefilled(self, stream: Stream) -> None:
        self._decode[stream.decode].publish(stream)
        self._events.at(self._events.now + self._fleet.times.handoff_s, lambda: self._first_token(stream))

    def _locally_prefilled(self, stream: Stream) -> None:
        self.result.local += 1
        self._decode[stream.decode].publish(stream)
        left_s = max(self._fleet.times.handoff_s - HANDOFF_S, 0.0)
        self._events.at(self._events.now + left_s, lambda: self._first_token(stream))

    def _too_many_new(self, stream: Stream) -> None:
        stream.remote = True
        self._events.at(self._events.now, lambda: self._route(stream))

    def _first_token(self, stream: Stream) -> None:
        stream.made += 1
        if stream.first_s is None:
            stream.first_s = self._events.now
            self.result.ttft.add(stream.first_s - stream.arrival_s)
        if stream.ticket is not None:
            self._gate.prefilled(stream.ticket)
        self._decode[stream.decode].join(stream)

    def _preempted(self, stream: Stream) -> None:
        self.result.preempted += 1
        stream.tokens, stream.pulled = stream.input + stream.made, False
        # Not at once: its worker is in the middle of a plan.
        self._events.at(self._events.now, lambda: self._route(stream))

    def _finished(self, stream: Stream) -> None:
        result, now = self.result, self._events.now
        first_s = now if stream.first_s is None else stream.first_s
        between = (now - first_s) / (stream.output - 1) if stream.output > 1 else 0.0
        if stream.output > 1:
            result.tpot.add(between)
        result.completed += 1
        result.output_tokens += stream.output
        result.last_s = now
        result.good += first_s - stream.arrival_s <= self._goal.ttft_s and between <= self._goal.tpot_s
        if stream.ticket is not None:
            self._gate.leave(stream.ticket, stream.output)


def _admission(fleet: ReplayFleet, clock: Callable[[], float]) -> AdmissionGate:
    """Return an admission queue for the whole fleet: its bounds grow with it, as an operator sets them."""
    sequences = fleet.decode * fleet.max_batch + fleet.prefill * PREFILLING_SEQUENCES
    queue = AdmissionQueue(
        sequences, QUEUED_TOKENS * fleet.prefill, max_delay=MaxQueueDelay(seconds=QUEUE_DELAY_S)
    )
    gate = AdmissionGate(queue, clock)
    tokens = fleet.decode * fleet.blocks * BLOCK_SIZE
    gate.resize(Capacity(sequences, fleet.prefill, kv_tokens=tokens, block_size=BLOCK_SIZE))
    return gate
