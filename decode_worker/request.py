"""The state of one attempt at a request on the decode worker.

Its life:

1. ATTACHED    the gateway has announced it; its KV is still being computed by a prefill worker, or it waits
               for blocks that this worker will compute itself.
2. PREFILLING  this worker computes its prompt (local_prefill.py); else a prefill worker does.
3. READY       the handoff is verified, the first tokens are sent; it waits for a place in the batch.
4. RUNNING     it takes part in steps.
5. ENDED       each of its step groups is finished, preempted, failed or cancelled; their blocks are released,
               or will be at the end of the step that is still writing them.

Every change of state goes through `move()`, which knows the legal ones and stamps the time.
"""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass, field
from typing import Literal

from decode_worker.gateway_stream import GatewayStream
from decode_worker.sequence import AttemptBlocks
from diptych.engine.kv.tiers.loaded import Loaded
from diptych.runtime.telemetry import AttributeValue, PhaseSpan
from diptych.worker.v1 import work_pb2
from diptych.worker_process.adapter_store import AdapterUse
from diptych.worker_process.attempt import Attempt
from diptych.worker_process.grammar_masks import GrammarState
from diptych.worker_process.logprob_codec import failure_name
from kvtransfer.protocol.messages import Key

Outcome = Literal["finished", "preempted", "failed", "cancelled"]
"""The end of a step group."""


class State(enum.Enum):
    ATTACHED = "attached"
    PREFILLING = "prefilling"
    READY = "ready"
    RUNNING = "running"
    ENDED = "ended"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.ATTACHED: frozenset({State.PREFILLING, State.READY, State.ENDED}),
    State.PREFILLING: frozenset({State.READY, State.ENDED}),
    State.READY: frozenset({State.RUNNING, State.ENDED}),
    State.RUNNING: frozenset({State.ENDED}),
    State.ENDED: frozenset(),
}


class InvalidTransition(RuntimeError):
    """A bug in the worker: a request was moved where it cannot go."""


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """The common state of an attempt's step groups."""

    attempt: Attempt
    gateway: GatewayStream
    blocks: AttemptBlocks
    wire_id: work_pb2.AttemptId
    adapter: AdapterUse | None = None  # until its blocks are released
    failed_for: int | None = None  # the reason, where all of it failed at once
    outcomes: list[Outcome] = field(default_factory=list)  # of the step groups that ended
    grammar: GrammarState | None = None  # after the tokens delivered so far
    compiling: asyncio.Task[GrammarState] | None = None  # until `grammar` is set
    decoded: int = 0  # tokens of all choices in this attempt
    drafted: int = 0  # drafted tokens that steps have checked
    accepted: int = 0  # drafted tokens that were right
    state: State = State.ATTACHED
    entered: dict[State, float] = field(default_factory=lambda: {State.ATTACHED: time.monotonic()})
    times: work_pb2.PhaseTimes = field(default_factory=work_pb2.PhaseTimes)
    transport: str = ""  # of its handoff
    loaded: Loaded | None = None  # blocks that came from tiers for it

    def move(self, to: State) -> None:
        if to not in TRANSITIONS[self.state]:
            raise InvalidTransition(f"{self.key}: {self.state.value} → {to.value}")
        self.state = to
        self.entered[to] = time.monotonic()

    @property
    def key(self) -> Key:
        return self.attempt.key

    @property
    def adapter_slot(self) -> int | None:
        """Slot of its adapter, which it has from its grant on; None: it is one of the base model."""
        return None if self.adapter is None else self.adapter.slot

    @property
    def outcome(self) -> Outcome:
        """The end of the attempt: finished, if all of its step groups are."""
        return next((outcome for outcome in self.outcomes if outcome != "finished"), "finished")

    def _count_loaded(self, loaded: Loaded) -> None:
        """Enter what came from tiers here, unless the prefill worker, at the same time, took more."""
        self.times.tier_blocks = max(self.times.tier_blocks, loaded.blocks.total())
        waited = max(self.times.kv_load.ToNanoseconds(), int(loaded.seconds * 1e9))
        self.times.kv_load.FromNanoseconds(waited)

    def times_now(self) -> work_pb2.PhaseTimes:
        """Return the phases so far: those of the prefill worker, of the handoff, and of this worker."""
        now = self.entered.get(State.ENDED) or time.monotonic()
        if self.drafted:
            self.times.drafted_tokens, self.times.accepted_draft_tokens = self.drafted, self.accepted
        ready, running = self.entered.get(State.READY), self.entered.get(State.RUNNING)
        if ready is not None:
            self.times.decode_queue.FromNanoseconds(int(((running or now) - ready) * 1e9))
        if self.loaded is not None:
            self._count_loaded(self.loaded)
        if running is not None:
            self.times.decode.FromNanoseconds(int((now - running) * 1e9))
        return self.times


def attempt_span(request: DecodeRequest) -> PhaseSpan | None:
    """Return the span `decode` of an ended attempt, with phases kv_transfer.receive, queue and decode.

    Where this worker computed the prompt, a phase prefill.local stands in for the transfer. None for an
    attempt that never got its blocks from a prefill worker: that worker's span covers it. A phase that never
    ran has no span. A failure is recorded on the phase that was active.
    """
    prefilling, running = request.entered.get(State.PREFILLING), request.entered.get(State.RUNNING)
    ready = request.entered.get(State.READY)
    end = request.entered.get(State.ENDED) or time.monotonic()
    if prefilling is not None:
        begun = request.entered[State.ATTACHED]
        phases = [
            PhaseSpan("kv_alloc_wait", begun, prefilling),
            PhaseSpan("prefill.local", prefilling, ready or end),
        ]
    elif ready is not None:
        begun = ready - request.times.kv_receive.ToNanoseconds() / 1e9
        phases = [PhaseSpan("kv_transfer.receive", begun, ready)]
    else:
        return None
    if ready is not None:
        phases.append(PhaseSpan("queue", ready, running or end))
    if running is not None:
        phases.append(PhaseSpan("decode", running, end))
    if request.outcome == "failed":
        last = phases[-1]
        error = request.outcome if request.failed_for is None else failure_name(request.failed_for)
        phases[-1] = PhaseSpan(last.name, last.start_s, last.end_s, error=error)
    attributes: dict[str, AttributeValue] = {
        "diptych.attempt": request.key[1],
        "diptych.outcome": request.outcome,
        "diptych.decode.tokens": request.decoded,
        "diptych.kv_transfer.bytes": request.times.kv_bytes_transferred,
        "diptych.prefill.local": prefilling is not None,
    }
    if prefilling is not None:
        attributes["diptych.prefill.tokens"] = len(request.attempt.token_ids)
        attributes["diptych.prefill.cached_tokens"] = request.times.cached_tokens
    return PhaseSpan(
        "decode",
        begun,
        end,
        attributes=attributes,
        key=request.attempt.decode_span,
        children=tuple(phases),
    )
