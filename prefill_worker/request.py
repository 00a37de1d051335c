"""The state of one attempt at a request on the prefill worker.

Its life:

1. QUEUED   dispatched by a gateway; it pins nothing anywhere.
2. ASKED    about to run: the decode worker was asked for blocks and answers when it has them.
3. GRANTED  the blocks are this worker's to write; chunks are computed and pushed.
4. ENDED    committed (the decode worker has all of it, the first token included), failed or cancelled. A
            granted attempt that does not commit ends with Stopped: the promise of no further write.

Every change of state goes through `move()`, which knows the legal ones and stamps the time.
"""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diptych.engine.prompt_logprobs import CHUNK
from diptych.runtime.telemetry import AttributeValue, PhaseSpan
from diptych.worker.v1 import work_pb2
from diptych.worker_process.adapter_store import AdapterUse
from diptych.worker_process.attempt import Attempt
from diptych.worker_process.grammar_masks import GrammarState
from diptych.worker_process.logprob_codec import failure_name
from kvtransfer.drivers.types import GrantedBlocks
from kvtransfer.protocol.messages import Key
from prefill_worker.scheduler import Prompt

if TYPE_CHECKING:
    from prefill_worker.gateway_stream import GatewayStream
    from prefill_worker.request_images import RequestImages


class State(enum.Enum):
    QUEUED = "queued"
    ASKED = "asked"
    GRANTED = "granted"
    ENDED = "ended"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.ASKED, State.ENDED}),
    State.ASKED: frozenset({State.GRANTED, State.ENDED}),
    State.GRANTED: frozenset({State.ENDED}),
    State.ENDED: frozenset(),
}


class InvalidTransition(RuntimeError):
    """A bug in the worker: a request was moved where it cannot go."""


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """Tokens up to `upto` are in the blocks; with the last chunk come the first tokens of the output."""

    upto: int
    first_tokens: tuple[work_pb2.SampledToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """An end without commit; `failure` is absent when another process ended the attempt."""

    failure: work_pb2.Failure | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class PrefillRequest:
    """An attempt and its progress. `events` go from the engine loop to the task that runs its handoff."""

    attempt: Attempt
    token_ids: list[int]
    gateway: GatewayStream
    arrived: int
    gateway_wait_s: float  # in its gateway's queue
    decode_address: str
    decode_incarnation: int
    adapter: AdapterUse | None = None
    adapter_released: bool = False
    state: State = State.QUEUED
    entered: dict[State, float] = field(default_factory=lambda: {State.QUEUED: time.monotonic()})
    wanted: set[int] = field(init=False)  # choices that are not cancelled
    grammar: GrammarState | None = None  # after the tokens delivered so far; None until it is compiled
    images: RequestImages | None = None
    granted: GrantedBlocks | None = None
    begun: float | None = None  # its first step
    computed: int = 0
    steps: int = 0
    computed_at: float | None = None  # end of the last chunk
    stop: Stop | None = None  # decided, and carried out when no step writes any more
    failure: work_pb2.Failure | None = None  # sent to the gateway at its end
    events: asyncio.Queue[ChunkDone | Stop] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.wanted = set(self.attempt.choices)

    def move(self, to: State) -> None:
        if to not in TRANSITIONS[self.state]:
            raise InvalidTransition(f"{self.key}: {self.state.value} → {to.value}")
        self.state = to
        self.entered[to] = time.monotonic()

    def begin(self, now: float) -> None:
        """Record the begin of a step that computes some of it."""
        if self.begun is None:
            self.begun = now

    def waited_s(self, now: float) -> float:
        """Return the seconds that it has waited for its first step, its gateway's queue included."""
        return self.gateway_wait_s + (now if self.begun is None else self.begun) - self.entered[State.QUEUED]

    @property
    def key(self) -> Key:
        return self.attempt.key

    @property
    def compiled(self) -> bool:
        """True if its grammar is compiled, if it has one: until then blocks would lie idle."""
        return self.attempt.grammar is None or self.grammar is not None

    @property
    def may_ask(self) -> bool:
        """True if it has what it needs beside blocks: its grammar, and rows that an encode worker makes."""
        return self.compiled and (self.images is None or not self.images.awaited)

    @property
    def computable(self) -> bool:
        """True if a step may compute a chunk of it."""
        ready = self.state is State.GRANTED and self.stop is None and self.remaining > 0 and self.compiled
        ready = ready and (self.adapter is None or self.adapter.placed)
        return ready and (self.images is None or self.images.ready(self.computed))

    @property
    def adapter_slot(self) -> int | None:
        """Slot of its adapter, which it has while it is computed; None: it is one of the base model."""
        return None if self.adapter is None else self.adapter.slot

    @property
    def asks_in_line(self) -> str:
        """Name of the line of asks that it stands in: attempts of one adapter may wait for its slot there,
        and hold up no others.
        """
        return f"{self.decode_address} {self.attempt.adapter.hex()}" if self.adapter else self.decode_address

    @property
    def remaining(self) -> int:
        return len(self.token_ids) - self.computed

    @property
    def pull_s(self) -> float:
        """Seconds for which cached blocks were pulled, between its grant and the state GRANTED."""
        return self.granted.pull_s if self.granted is not None else 0.0

    @property
    def load_s(self) -> float:
        """Seconds for which it waited for blocks from tiers, between its ask and its grant."""
        return self.granted.loaded.seconds if self.granted is not None else 0.0

    @property
    def fetched_at(self) -> float:
        """Time when the rows of images that its ask waits for were here; without any, when it came."""
        found = None if self.images is None else self.images.fetched_at
        return self.entered[State.QUEUED] if found is None else found

    def begun_at(self, granted: float) -> float:
        """Return the time when it had its blocks, since `granted`, and the rows of all its images."""
        found = None if self.images is None else self.images.encoded_at
        return granted if found is None else max(granted, found)

    @property
    def plan_entry(self) -> Prompt:
        attempt = self.attempt
        limit = None if attempt.prompt_logprobs is None else CHUNK
        unbroken = () if self.images is None else self.images.unbroken(self.computed)
        line = self.asks_in_line
        blocks = None if self.granted is None else self.granted.memory.layout
        return Prompt(self.key, self.remaining, line, attempt.priority, self.arrived, limit, unbroken, blocks)

    def times(self) -> work_pb2.PhaseTimes:
        """Return the phases so far, as durations on this worker's clock."""
        asked, granted = self.entered.get(State.ASKED), self.entered.get(State.GRANTED)
        now = time.monotonic()
        times = work_pb2.PhaseTimes(prefill_steps=self.steps)
        times.prefill_queue.FromNanoseconds(_ns((asked or now) - self.fetched_at))
        encode_s = self.fetched_at - self.entered[State.QUEUED]
        if asked is not None:
            times.grant_wait.FromNanoseconds(_ns((granted or now) - asked - self.pull_s - self.load_s))
        if self.pull_s:
            times.kv_pull.FromNanoseconds(_ns(self.pull_s))
        if granted is not None:
            begun = self.begun_at(granted)
            times.prefill.FromNanoseconds(_ns((self.computed_at or now) - begun))
            encode_s += begun - granted
        if encode_s:
            times.encode.FromNanoseconds(_ns(encode_s))
        if self.computed_at is not None:
            times.kv_send.FromNanoseconds(_ns(now - self.computed_at))
        if self.granted is not None:
            times.cached_tokens = self.granted.computed_tokens
            if tier_blocks := self.granted.loaded.blocks.total():
                times.tier_blocks = tier_blocks
                times.kv_load.FromNanoseconds(_ns(self.load_s))
        return times


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def attempt_span(request: PrefillRequest, outcome: str) -> PhaseSpan:
    """Return the span `prefill` of an ended attempt, with phases queue, kv_alloc_wait, kv_pull, prefill and
    kv_transfer.send; encode is first where rows of images were fetched, before prefill where they were made
    here.

    A phase that never ran has no span. A failure is recorded on the phase that was active.
    """
    end = request.entered.get(State.ENDED) or time.monotonic()
    queued, asked = request.entered[State.QUEUED], request.entered.get(State.ASKED)
    granted, computed = request.entered.get(State.GRANTED), request.computed_at
    fetched = request.fetched_at
    begun = None if granted is None else request.begun_at(granted)
    starts = [
        ("encode", queued if fetched > queued else None),
        ("queue", fetched),
        ("kv_alloc_wait", asked),
        ("kv_pull", granted - request.pull_s if granted is not None and request.pull_s else None),
        ("encode", granted if begun != granted else None),
        ("prefill", begun),
        ("kv_transfer.send", computed),
    ]
    ran = [(name, start) for name, start in starts if start is not None]
    ends = [start for _, start in ran[1:]] + [end]
    phases = [PhaseSpan(name, start, stop) for (name, start), stop in zip(ran, ends, strict=True)]
    if outcome == "failed":
        last = phases[-1]
        error = outcome if request.failure is None else failure_name(request.failure.reason)
        phases[-1] = PhaseSpan(last.name, last.start_s, last.end_s, error=error)
    attributes: dict[str, AttributeValue] = {
        "diptych.attempt": request.key[1],
        "diptych.outcome": outcome,
        "diptych.prefill.tokens": len(request.token_ids),
        "diptych.prefill.cached_tokens": 0 if request.granted is None else request.granted.computed_tokens,
        "diptych.prefill.steps": request.steps,
    }
    return PhaseSpan(
        "prefill",
        queued,
        end,
        attributes=attributes,
        key=request.attempt.prefill_span,
        children=tuple(phases),
    )
