"""One attempt at one request on the decode worker.

Its life:

1. ATTACHED   the gateway has announced it; its KV is still being computed elsewhere.
2. READY      the handoff is verified, the first tokens have gone out; it waits for a place in the batch.
3. RUNNING    it takes part in steps.
4. ENDED      each of its gangs is finished, preempted, failed or cancelled; their blocks are released, or
              will be at the end of the step that is still writing them.

Every change of state goes through `move()`, which knows the legal ones and stamps the time.
"""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass, field
from typing import Literal

from decode_worker.attempt_blocks import AttemptBlocks
from decode_worker.gateway_stream import GatewayStream
from diptych.worker.v1 import work_pb2
from diptych.worker_process.attempt import Attempt
from diptych.worker_process.grammar_masks import GrammarState
from kvtransfer.protocol.messages import Key

Outcome = Literal["finished", "preempted", "failed", "cancelled"]
"""How a gang ended."""


class State(enum.Enum):
    ATTACHED = "attached"
    READY = "ready"
    RUNNING = "running"
    ENDED = "ended"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.ATTACHED: frozenset({State.READY, State.ENDED}),
    State.READY: frozenset({State.RUNNING, State.ENDED}),
    State.RUNNING: frozenset({State.ENDED}),
    State.ENDED: frozenset(),
}


class InvalidTransition(RuntimeError):
    """A bug in the worker: a request was moved where it cannot go."""


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """What the gangs of an attempt have in common."""

    attempt: Attempt
    gateway: GatewayStream
    blocks: AttemptBlocks
    wire_id: work_pb2.AttemptId
    failed_for: int | None = None  # the reason, where all of it failed at once
    outcomes: list[Outcome] = field(default_factory=list)  # of the gangs that ended
    grammar: GrammarState | None = None  # after the tokens delivered so far
    compiling: asyncio.Task[GrammarState] | None = None  # until that is there
    decoded: int = 0  # tokens of all choices in this attempt
    drafted: int = 0  # tokens of steps that may have been expected rightly
    accepted: int = 0  # of these, those that were
    state: State = State.ATTACHED
    entered: dict[State, float] = field(default_factory=lambda: {State.ATTACHED: time.monotonic()})
    times: work_pb2.PhaseTimes = field(default_factory=work_pb2.PhaseTimes)
    transport: str = ""  # what brought its blocks

    def move(self, to: State) -> None:
        if to not in TRANSITIONS[self.state]:
            raise InvalidTransition(f"{self.key}: {self.state.value} → {to.value}")
        self.state = to
        self.entered[to] = time.monotonic()

    @property
    def key(self) -> Key:
        return self.attempt.key

    @property
    def outcome(self) -> Outcome:
        """How it ended, taken together: finished, if all of its gangs are."""
        return next((outcome for outcome in self.outcomes if outcome != "finished"), "finished")

    def times_now(self) -> work_pb2.PhaseTimes:
        """The attempt's phases so far: the prefill worker's, the handoff's, and ours."""
        now = self.entered.get(State.ENDED) or time.monotonic()
        ready, running = self.entered.get(State.READY), self.entered.get(State.RUNNING)
        if ready is not None:
            self.times.decode_queue.FromNanoseconds(int(((running or now) - ready) * 1e9))
        if running is not None:
            self.times.decode.FromNanoseconds(int((now - running) * 1e9))
        return self.times
