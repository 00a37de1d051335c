"""The two protocols between gateway and workers, as the links use them: messages out, news in.

Protobuf of ``diptych.worker.v1`` ends here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

from google.protobuf.message import Message

from diptych.runtime.rpc_streams.method import DECODE, PREFILL, LinkMethod
from diptych.worker.v1 import decode_pb2, prefill_pb2, work_pb2
from gateway.attempt.phase_times import Phases, read_phases
from gateway.attempt.types import Cause, FinishReason, Role, TokenScore
from gateway.attempt.worker_events import (
    AttemptFailed,
    DecodeFinished,
    PrefillCommitted,
    TokensArrived,
    WorkerEvent,
)

_CAUSES = {
    work_pb2.FAILURE_REASON_UNSPECIFIED: Cause.INTERNAL,
    work_pb2.FAILURE_REASON_INTERNAL: Cause.INTERNAL,
    work_pb2.FAILURE_REASON_KV_TRANSFER_FAILED: Cause.KV_TRANSFER_FAILED,
    work_pb2.FAILURE_REASON_PEER_LOST: Cause.PEER_LOST,
    work_pb2.FAILURE_REASON_DRAINING: Cause.DRAINING,
    work_pb2.FAILURE_REASON_EXCEEDS_KV_CAPACITY: Cause.EXCEEDS_KV_CAPACITY,
    work_pb2.FAILURE_REASON_DEADLINE: Cause.DEADLINE,
    work_pb2.FAILURE_REASON_INCOMPATIBLE: Cause.INCOMPATIBLE,
    work_pb2.FAILURE_REASON_NO_VALID_TOKEN: Cause.NO_VALID_TOKEN,
    work_pb2.FAILURE_REASON_COMPUTE_FAILED: Cause.COMPUTE_FAILED,
}
_FINISHES = {
    work_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    work_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """Who answers at the other end."""

    worker_id: str
    incarnation: int


class StepTime(NamedTuple):
    """Recent steps of a worker that computed about as many tokens: see ``diptych.worker.v1.StepTime``."""

    size_class: int
    steps: int
    median_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker has to do, as it says; see ``diptych.worker.v1.Load``."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    quarantined_blocks: int = 0
    draining: bool = False  # it takes nothing new
    step_times: tuple[StepTime, ...] = ()
    max_running: int = 0  # sequences in a step of a decode worker; 0 = it does not say

    @property
    def capacity(self) -> tuple[bool, int, int]:
        """Of all this, what says how much the worker can take and not how much it has."""
        return self.draining, self.max_running, self.quarantined_blocks


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life, usually with the load. ``late_s``: how far its engine's running step is past the end
    that the worker itself had predicted.
    """

    load: Load | None
    late_s: float = 0.0


class PromptScored(NamedTuple):
    """Scores of the prompt's tokens from position ``first`` on; of the first token there is none."""

    first: int
    scores: tuple[TokenScore, ...]


class LinkEvent(NamedTuple):
    """What a worker says about one attempt. (A NamedTuple: one is made for every token.)"""

    work_id: str
    attempt: int
    event: WorkerEvent | PromptScored
    last_word: bool = False  # nothing more comes of this choice (or attempt) from this worker
    choice: int = 0
    cached_tokens: int = 0
    phases: Phases | None = None
    detail: str = ""  # of a failure, for the log


class Flushed(NamedTuple):
    """The answer to a flush: how many keys were forgotten."""

    request: int
    blocks: int


Heard = WorkerHello | Heartbeat | Flushed | list[LinkEvent]


class WorkerCodec(Protocol):
    """One role's protocol. A `flush` is answered by `Flushed` with the same number."""

    @property
    def role(self) -> Role: ...
    @property
    def method(self) -> LinkMethod: ...
    def hello(self) -> Message: ...
    def heartbeat(self, progress: int) -> Message: ...
    def cancel(self, work_id: str, attempt: int, choices: Sequence[int]) -> Message: ...
    def drain(self, grace_s: float | None) -> Message: ...
    def flush(self, request: int) -> Message: ...
    def read(self, message: Any) -> Heard: ...


class _RoleWire:
    """What both protocols have in common: messages of the same names, in requests of different types."""

    _request: ClassVar[Callable[..., Message]]

    def __init__(self, gateway_id: str, incarnation: int) -> None:
        self._hello = work_pb2.GatewayHello(gateway_id=gateway_id, incarnation=incarnation)

    def hello(self) -> Message:
        return self._request(hello=self._hello)

    def heartbeat(self, progress: int) -> Message:
        return self._request(heartbeat=work_pb2.Heartbeat(progress=progress))

    def cancel(self, work_id: str, attempt: int, choices: Sequence[int]) -> Message:
        return self._request(cancel=_cancel(work_id, attempt, choices))

    def drain(self, grace_s: float | None) -> Message:
        return self._request(drain=_drain(grace_s))

    def flush(self, request: int) -> Message:
        return self._request(flush=work_pb2.FlushPrefixCache(id=request))

    @staticmethod
    def _read_common(kind: str | None, message: Any) -> Heard:
        if kind == "flushed":
            return Flushed(message.flushed.id, message.flushed.blocks)
        return _greeting(message.hello) if kind == "hello" else _beat(message.heartbeat)


class PrefillCodec(_RoleWire):
    """Gateway ↔ prefill worker."""

    role = Role.PREFILL
    method = PREFILL
    _request = prefill_pb2.PrefillServiceLinkRequest

    def read(self, message: prefill_pb2.PrefillServiceLinkResponse) -> Heard:
        kind = message.WhichOneof("message")
        if kind == "ended":
            return [_prefill_ended(message.ended)]
        if kind == "first_tokens":
            return [_tokens(tokens, early=True) for tokens in message.first_tokens.tokens]
        if kind == "prompt_scores":
            return [_prompt_scores(message.prompt_scores)]
        return self._read_common(kind, message)


class DecodeCodec(_RoleWire):
    """Gateway ↔ decode worker."""

    role = Role.DECODE
    method = DECODE
    _request = decode_pb2.DecodeServiceLinkRequest

    def read(self, message: decode_pb2.DecodeServiceLinkResponse) -> Heard:
        kind = message.WhichOneof("message")
        if kind == "step":
            step = message.step
            return [*map(_tokens, step.tokens), *map(_decode_ended, step.ended)]
        return self._read_common(kind, message)


def _cancel(work_id: str, attempt: int, choices: Sequence[int]) -> work_pb2.Cancel:
    return work_pb2.Cancel(id=work_pb2.AttemptId(request_id=work_id, attempt=attempt), choices=choices)


def _drain(grace_s: float | None) -> work_pb2.Drain:
    drain = work_pb2.Drain()
    if grace_s is not None:
        drain.grace.FromNanoseconds(round(grace_s * 1e9))
    return drain


def _greeting(hello: work_pb2.WorkerHello) -> WorkerHello:
    return WorkerHello(hello.worker_id, hello.incarnation)


def _beat(heartbeat: work_pb2.Heartbeat) -> Heartbeat:
    load = None
    if heartbeat.HasField("load"):
        said = heartbeat.load
        load = Load(
            said.running,
            said.waiting,
            said.waiting_tokens,
            said.free_blocks,
            said.total_blocks,
            said.quarantined_blocks,
            said.draining,
            tuple(
                StepTime(one.size_class, one.steps, one.median.ToNanoseconds() / 1e9)
                for one in said.step_times
            ),
            said.max_running,
        )
    return Heartbeat(load, heartbeat.late.ToNanoseconds() / 1e9 if heartbeat.HasField("late") else 0.0)


def _tokens(tokens: work_pb2.Tokens, early: bool = False) -> LinkEvent:
    name, ids, choice = tokens.id, tuple(tokens.token_ids), tokens.choice
    attempt = name.attempt
    phases = None
    if tokens.HasField("times"):  # the decode phase has only begun: what it has so far says nothing
        phases = replace(read_phases(tokens.times), decode=0.0)
    scores = tuple(map(_score, tokens.scores)) if tokens.scores else ()
    event = TokensArrived(attempt, tokens.index, ids, choice, scores, early)
    return LinkEvent(name.request_id, attempt, event, False, choice, tokens.cached_tokens, phases)


def _score(score: work_pb2.Score) -> TokenScore:
    return TokenScore(score.logprob, score.rank, tuple((a.token_id, a.logprob) for a in score.top))


def _prompt_scores(said: prefill_pb2.PromptScores) -> LinkEvent:
    event = PromptScored(said.first_position, tuple(map(_score, said.scores)))
    return LinkEvent(said.id.request_id, said.id.attempt, event)


def _decode_ended(ended: decode_pb2.DecodeEnded) -> LinkEvent:
    attempt, outcome, choice = ended.id.attempt, ended.WhichOneof("outcome"), ended.choice
    event: WorkerEvent
    if outcome == "finished" and ended.finished in _FINISHES:
        event = DecodeFinished(attempt, _FINISHES[ended.finished], choice)
    elif outcome == "preempted":
        event = AttemptFailed(attempt, Role.DECODE, Cause.PREEMPTED, choice)
    else:
        event = AttemptFailed(attempt, Role.DECODE, _cause(ended.failure), choice)
    return LinkEvent(
        ended.id.request_id,
        attempt,
        event,
        last_word=True,
        choice=choice,
        phases=read_phases(ended.times) if ended.HasField("times") else None,
        detail=ended.failure.message,
    )


def _prefill_ended(ended: prefill_pb2.PrefillEnded) -> LinkEvent:
    attempt = ended.id.attempt
    event: WorkerEvent
    if ended.WhichOneof("outcome") == "committed":
        event = PrefillCommitted(attempt)
    else:
        event = AttemptFailed(attempt, Role.PREFILL, _cause(ended.failure))
    return LinkEvent(ended.id.request_id, attempt, event, last_word=True, detail=ended.failure.message)


def _cause(failure: work_pb2.Failure) -> Cause:
    """A reason that this build does not know is a bug on one of the two sides."""
    return _CAUSES.get(failure.reason, Cause.INTERNAL)
