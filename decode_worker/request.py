"""One attempt at one request on the decode worker.

Its life:

1. ATTACHED   the gateway has announced it; its KV is still being computed elsewhere.
2. READY      the hand-over is verified, the first token has gone out; it waits for a place in the batch.
3. RUNNING    it takes part in every step.
4. ENDED      finished, preempted, failed or cancelled; its blocks are released, or will be at the end of
              the step that is still writing them.

Every change of state goes through `move()`, which knows the legal ones and stamps the time.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diptych.worker.v1 import work_pb2
from kvtransfer.messages import Key
from worker.attempt import Attempt

if TYPE_CHECKING:
    from decode_worker.gateway_stream import GatewayStream


class State(enum.Enum):
    ATTACHED = "attached"
    READY = "ready"
    RUNNING = "running"
    ENDED = "ended"


LEGAL: dict[State, frozenset[State]] = {
    State.ATTACHED: frozenset({State.READY, State.ENDED}),
    State.READY: frozenset({State.RUNNING, State.ENDED}),
    State.RUNNING: frozenset({State.ENDED}),
    State.ENDED: frozenset(),
}


class IllegalMove(RuntimeError):
    """A bug in the worker: a request was moved where it cannot go."""


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """An attempt, the tokens it has so far and the blocks it holds."""

    attempt: Attempt
    gateway: GatewayStream
    joined: int
    output_ids: list[int]  # delivered by earlier attempts, then by this one
    state: State = State.ATTACHED
    entered: dict[State, float] = field(default_factory=lambda: {State.ATTACHED: time.monotonic()})
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)  # of the blocks already in the prefix cache
    times: work_pb2.PhaseTimes = field(default_factory=work_pb2.PhaseTimes)

    def move(self, to: State) -> None:
        if to not in LEGAL[self.state]:
            raise IllegalMove(f"{self.key}: {self.state.value} → {to.value}")
        self.state = to
        self.entered[to] = time.monotonic()

    @property
    def key(self) -> Key:
        return self.attempt.key

    @property
    def num_tokens(self) -> int:
        """Prompt and output; the KV of the last one is not computed yet."""
        return len(self.attempt.prompt_ids) + len(self.output_ids)

    def finish_reason(self) -> work_pb2.FinishReason | None:
        """Why the token that was just appended ends the request, or None if it does not."""
        if self.output_ids[-1] in self.attempt.stop_token_ids:
            return work_pb2.FINISH_REASON_STOP
        if len(self.output_ids) >= self.attempt.max_tokens:
            return work_pb2.FINISH_REASON_LENGTH
        return None

    def times_now(self) -> work_pb2.PhaseTimes:
        """The attempt's phases so far: the prefill worker's, the hand-over's, and ours."""
        now = time.monotonic()
        ready, running = self.entered.get(State.READY), self.entered.get(State.RUNNING)
        if ready is not None:
            self.times.decode_queue.FromNanoseconds(int(((running or now) - ready) * 1e9))
        if running is not None:
            self.times.decode.FromNanoseconds(int((now - running) * 1e9))
        return self.times
