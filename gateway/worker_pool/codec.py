"""The codecs of the worker protocols: messages out, events in.

Protobuf of ``diptych.worker.v1`` ends here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

from google.protobuf.message import Message

from diptych.runtime.rpc_streams.method import DECODE, ENCODE, PREFILL, LinkMethod
from diptych.worker.v1 import decode_pb2, encode_pb2, prefill_pb2, work_pb2
from gateway.adapters.adapter import Adapter
from gateway.attempt.phase_times import PhaseTimes, read_phase_times
from gateway.attempt.types import (
    AttemptEvent,
    AttemptFailed,
    Cause,
    DecodeFinished,
    FinishReason,
    ImagesDelivered,
    PrefillCommitted,
    Role,
    TokenLogprob,
    TokensArrived,
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
    work_pb2.FAILURE_REASON_TOO_MANY_NEW: Cause.TOO_MANY_NEW,
    work_pb2.FAILURE_REASON_ADAPTER_NOT_LOADED: Cause.ADAPTER_NOT_LOADED,
    work_pb2.FAILURE_REASON_ENCODER_LOST: Cause.ENCODER_LOST,
}
_WIRE_ROLES = {
    Role.PREFILL: work_pb2.WORKER_ROLE_PREFILL,
    Role.DECODE: work_pb2.WORKER_ROLE_DECODE,
}
_ROLES = {wire: role for role, wire in _WIRE_ROLES.items()}
_FINISHES = {
    work_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    work_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """The identity of the worker at the other end."""

    worker_id: str
    incarnation: int


class StepTime(NamedTuple):
    """Recent steps of a worker that computed about as many tokens: see ``diptych.worker.v1.StepTime``."""

    size_class: int
    steps: int
    median_s: float
    tokens: int = 0  # 0 = not reported


class Rank(NamedTuple):
    """A process of a worker that is several; see ``diptych.worker.v1.Rank``."""

    pid: int
    state: str
    weight_bytes: int
    kv_bytes: int
    other_bytes: int
    left_bytes: int | None


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a worker as it reports it; see ``diptych.worker.v1.Load``."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    quarantined_blocks: int = 0
    draining: bool = False  # it takes no new work
    step_times: tuple[StepTime, ...] = ()
    max_running: int = 0  # sequences in a step of a decode worker; 0 = not reported
    pull_cost: float | None = None  # of a cached token that a prefill worker pulls; None = it pulls none
    max_local_prefill_tokens: int = 0  # new tokens of a prompt that a decode worker computes itself
    max_fallback_prefill_tokens: int = 0  # likewise while no prefill worker is ready
    local_prefill_chunk: int = 0  # tokens of such prompts in a step beside running sequences
    local_prefills: int = 0  # prompts that it has computed
    adapters: tuple[bytes, ...] = ()  # digests of those in its memory
    max_loras: int = 0  # that a step can compute at once
    tier_token_s: float | None = None  # seconds a token that it loads from its tiers; None = not measured
    drafted_tokens: int = 0  # that a decode worker has drafted and checked
    accepted_draft_tokens: int = 0  # of these, those that were right
    ranks: tuple[Rank, ...] = ()  # stage by stage; none where the worker is one process
    stages: int = 0
    becomes: Role | None = None  # the role that it drains for
    busy_share: float = 0.0  # of the last seconds, in which it computed a step

    @property
    def capacity(self) -> tuple[bool, int, int, int]:
        """The fields that say how much work the worker can take, not how much it has."""
        return self.draining, self.max_running, self.quarantined_blocks, self.max_fallback_prefill_tokens


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life, usually with the load.

    ``late_s``: seconds by which the engine's running step is past the end that the worker had predicted.
    """

    load: Load | None
    late_s: float = 0.0


class PromptLogprobsArrived(NamedTuple):
    """Log-probabilities of the prompt's tokens from position ``first`` on; the first token has none."""

    first: int
    logprobs: tuple[TokenLogprob, ...]


class WorkerEvent(NamedTuple):
    """An event of one attempt, with the worker's details. (A NamedTuple: one is made for every token.)"""

    work_id: str
    attempt: int
    event: AttemptEvent | PromptLogprobsArrived
    terminal: bool = False  # no message follows on this choice (or attempt) from this worker
    choice: int = 0
    cached_tokens: int = 0
    phases: PhaseTimes | None = None
    detail: str = ""  # of a failure, for the log


class Flushed(NamedTuple):
    """The answer to a flush: how many keys were forgotten."""

    request: int
    blocks: int


class AdapterAnswer(NamedTuple):
    """The answer to a load or an unload of an adapter; ``failure`` is empty when it is done."""

    number: int
    failure: str


WorkerMessage = WorkerHello | Heartbeat | Flushed | AdapterAnswer | list[WorkerEvent]


class WorkerCodec(Protocol):
    """The codec of one role's protocol. A flush is answered by `Flushed` with the same number."""

    @property
    def role(self) -> Role: ...
    @property
    def method(self) -> LinkMethod: ...
    def build_hello(self) -> Message: ...
    def build_heartbeat(self, progress: int) -> Message: ...
    def build_cancel(self, work_id: str, attempt: int, choices: Sequence[int]) -> Message: ...
    def build_drain(self, grace_s: float | None, become: Role | None = None) -> Message: ...
    def build_flush(self, request: int) -> Message: ...
    def build_load_adapter(self, number: int, adapter: Adapter) -> Message: ...
    def build_unload_adapter(self, number: int, digest: bytes) -> Message: ...
    def parse(self, message: Any) -> WorkerMessage: ...


class _RoleCodec:
    """The messages that all protocols have, in requests of different types."""

    _request: ClassVar[Callable[..., Message]]

    def __init__(self, gateway_id: str, incarnation: int) -> None:
        self._hello = work_pb2.GatewayHello(gateway_id=gateway_id, incarnation=incarnation)

    def build_hello(self) -> Message:
        return self._request(hello=self._hello)

    def build_heartbeat(self, progress: int) -> Message:
        return self._request(heartbeat=work_pb2.Heartbeat(progress=progress))

    def build_cancel(self, work_id: str, attempt: int, choices: Sequence[int]) -> Message:
        return self._request(cancel=_cancel(work_id, attempt, choices))

    def build_drain(self, grace_s: float | None, become: Role | None = None) -> Message:
        return self._request(drain=_drain(grace_s, become))

    def build_flush(self, request: int) -> Message:
        return self._request(flush=work_pb2.FlushPrefixCache(id=request))

    def build_load_adapter(self, number: int, adapter: Adapter) -> Message:
        load = work_pb2.LoadAdapter(id=number, digest=adapter.digest, name=adapter.name, path=adapter.path)
        return self._request(load_adapter=load)

    def build_unload_adapter(self, number: int, digest: bytes) -> Message:
        return self._request(unload_adapter=work_pb2.UnloadAdapter(id=number, digest=digest))

    @staticmethod
    def _parse_common(kind: str | None, message: Any) -> WorkerMessage:
        if kind == "flushed":
            return Flushed(message.flushed.id, message.flushed.blocks)
        if kind == "adapter_answer":
            return _adapter_answer(message.adapter_answer)
        return _hello(message.hello) if kind == "hello" else _heartbeat(message.heartbeat)


class PrefillCodec(_RoleCodec):
    """The codec between gateway and prefill worker."""

    role = Role.PREFILL
    method = PREFILL
    _request = prefill_pb2.PrefillServiceLinkRequest

    def parse(self, message: prefill_pb2.PrefillServiceLinkResponse) -> WorkerMessage:
        kind = message.WhichOneof("message")
        if kind == "ended":
            return [_prefill_ended(message.ended)]
        if kind == "first_tokens":
            return [_tokens(tokens, early=True) for tokens in message.first_tokens.tokens]
        if kind == "prompt_scores":
            return [_prompt_logprobs(message.prompt_scores)]
        return self._parse_common(kind, message)


class DecodeCodec(_RoleCodec):
    """The codec between gateway and decode worker."""

    role = Role.DECODE
    method = DECODE
    _request = decode_pb2.DecodeServiceLinkRequest

    def parse(self, message: decode_pb2.DecodeServiceLinkResponse) -> WorkerMessage:
        kind = message.WhichOneof("message")
        if kind == "step":
            step = message.step
            return [*map(_tokens, step.tokens), *map(_decode_ended, step.ended)]
        if kind == "prompt_scores":
            return [_prompt_logprobs(message.prompt_scores)]
        return self._parse_common(kind, message)


class EncodeCodec(_RoleCodec):
    """The codec between gateway and encode worker, which has no adapters."""

    role = Role.ENCODE
    method = ENCODE
    _request = encode_pb2.EncodeServiceLinkRequest

    def parse(self, message: encode_pb2.EncodeServiceLinkResponse) -> WorkerMessage:
        kind = message.WhichOneof("message")
        if kind == "ended":
            return [_encode_ended(message.ended)]
        return self._parse_common(kind, message)


def _cancel(work_id: str, attempt: int, choices: Sequence[int]) -> work_pb2.Cancel:
    return work_pb2.Cancel(id=work_pb2.AttemptId(request_id=work_id, attempt=attempt), choices=choices)


def _drain(grace_s: float | None, become: Role | None) -> work_pb2.Drain:
    drain = work_pb2.Drain() if become is None else work_pb2.Drain(become=_WIRE_ROLES[become])
    if grace_s is not None:
        drain.grace.FromNanoseconds(round(grace_s * 1e9))
    return drain


def _hello(hello: work_pb2.WorkerHello) -> WorkerHello:
    return WorkerHello(hello.worker_id, hello.incarnation)


def _heartbeat(heartbeat: work_pb2.Heartbeat) -> Heartbeat:
    load = None
    if heartbeat.HasField("load"):
        sent = heartbeat.load
        load = Load(
            sent.running,
            sent.waiting,
            sent.waiting_tokens,
            sent.free_blocks,
            sent.total_blocks,
            sent.quarantined_blocks,
            sent.draining,
            tuple(
                StepTime(one.size_class, one.steps, one.median.ToNanoseconds() / 1e9, one.tokens)
                for one in sent.step_times
            ),
            sent.max_running,
            sent.pull_cost if sent.HasField("pull_cost") else None,
            sent.max_local_prefill_tokens,
            sent.max_fallback_prefill_tokens,
            sent.local_prefill_chunk,
            sent.local_prefills,
            tuple(sent.adapters),
            sent.max_loras,
            sent.tier_token_s if sent.HasField("tier_token_s") else None,
            sent.drafted_tokens,
            sent.accepted_draft_tokens,
            tuple(_rank(rank) for rank in sent.ranks),
            sent.stages,
            _ROLES.get(sent.becomes),
            sent.busy_share,
        )
    return Heartbeat(load, heartbeat.late.ToNanoseconds() / 1e9 if heartbeat.HasField("late") else 0.0)


def _rank(rank: work_pb2.Rank) -> Rank:
    left = rank.left_bytes if rank.HasField("left_bytes") else None
    return Rank(rank.pid, rank.state, rank.weight_bytes, rank.kv_bytes, rank.other_bytes, left)


def _adapter_answer(answer: work_pb2.AdapterAnswer) -> AdapterAnswer:
    failure = answer.failure.message or "it does not say why" if answer.HasField("failure") else ""
    return AdapterAnswer(answer.id, failure)


def _tokens(tokens: work_pb2.Tokens, early: bool = False) -> WorkerEvent:
    name, ids, choice = tokens.id, tuple(tokens.token_ids), tokens.choice
    attempt = name.attempt
    phases = None
    if tokens.HasField("times"):  # the decode phase has only begun: its time so far means nothing
        phases = replace(read_phase_times(tokens.times), decode=0.0)
    logprobs = tuple(map(_logprob, tokens.scores)) if tokens.scores else ()
    event = TokensArrived(attempt, tokens.index, ids, choice, logprobs, early)
    return WorkerEvent(name.request_id, attempt, event, False, choice, tokens.cached_tokens, phases)


def _logprob(score: work_pb2.Score) -> TokenLogprob:
    return TokenLogprob(score.logprob, score.rank, tuple((a.token_id, a.logprob) for a in score.top))


def _prompt_logprobs(sent: work_pb2.PromptScores) -> WorkerEvent:
    event = PromptLogprobsArrived(sent.first_position, tuple(map(_logprob, sent.scores)))
    return WorkerEvent(sent.id.request_id, sent.id.attempt, event)


def _decode_ended(ended: decode_pb2.DecodeEnded) -> WorkerEvent:
    attempt, outcome, choice = ended.id.attempt, ended.WhichOneof("outcome"), ended.choice
    event: AttemptEvent
    if outcome == "finished" and ended.finished in _FINISHES:
        event = DecodeFinished(attempt, _FINISHES[ended.finished], choice)
    elif outcome == "preempted":
        event = AttemptFailed(attempt, Role.DECODE, Cause.PREEMPTED, choice)
    else:
        event = AttemptFailed(attempt, Role.DECODE, _cause(ended.failure), choice)
    return WorkerEvent(
        ended.id.request_id,
        attempt,
        event,
        terminal=True,
        choice=choice,
        phases=read_phase_times(ended.times) if ended.HasField("times") else None,
        detail=ended.failure.message,
    )


def _prefill_ended(ended: prefill_pb2.PrefillEnded) -> WorkerEvent:
    attempt = ended.id.attempt
    event: AttemptEvent
    if ended.WhichOneof("outcome") == "committed":
        event = PrefillCommitted(attempt)
    else:
        event = AttemptFailed(attempt, Role.PREFILL, _cause(ended.failure))
    return WorkerEvent(ended.id.request_id, attempt, event, terminal=True, detail=ended.failure.message)


def _encode_ended(ended: encode_pb2.EncodeEnded) -> WorkerEvent:
    attempt = ended.id.attempt
    event: AttemptEvent
    if ended.WhichOneof("outcome") == "delivered":
        event = ImagesDelivered(attempt)
    else:
        event = AttemptFailed(attempt, Role.ENCODE, _cause(ended.failure))
    return WorkerEvent(ended.id.request_id, attempt, event, terminal=True, detail=ended.failure.message)


def _cause(failure: work_pb2.Failure) -> Cause:
    """Return the cause of a failure; a reason that this build does not know is a bug on one side."""
    return _CAUSES.get(failure.reason, Cause.INTERNAL)
