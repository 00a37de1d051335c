"""The `Work` message for the two workers of an attempt: one per attempt, the same for both roles."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from diptych.parameters import SAMPLING_NUMBERS
from diptych.runtime.grammar.grammar import Kind
from diptych.worker.v1 import work_pb2
from gateway.access.access import DEFAULT_TENANT
from gateway.attempt.types import LocalPrefill
from gateway.request.parsed_request import ParsedRequest

_KINDS = {
    Kind.JSON_SCHEMA: work_pb2.Grammar.KIND_JSON_SCHEMA,
    Kind.REGEX: work_pb2.Grammar.KIND_REGEX,
    Kind.LARK: work_pb2.Grammar.KIND_LARK,
}
_LOCAL = {
    LocalPrefill.NO: work_pb2.LOCAL_PREFILL_UNSPECIFIED,
    LocalPrefill.SHORT: work_pb2.LOCAL_PREFILL_SHORT,
    LocalPrefill.FALLBACK: work_pb2.LOCAL_PREFILL_FALLBACK,
}
MIN_REPORTED_WAIT_S = 0.01


def new_work_id(request_id: str) -> str:
    """Return an id of a request for gateway and workers: the client's id and a nonce.

    A client may use its id again the moment a request is over, and two gateways may get the same one; a late
    message about the older request must not be taken for one about the newer.
    """
    return f"{request_id}~{secrets.token_hex(6)}"


@dataclass(frozen=True, slots=True)
class TraceParent:
    """W3C trace context of the workers' spans; empty strings when nothing is traced."""

    traceparent: str = ""
    tracestate: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """The part of a request that is the same for all its attempts."""

    work_id: str
    request: ParsedRequest = field(repr=False)
    max_tokens: int  # resolved, at least 1
    stop_token_ids: tuple[int, ...]  # end of sequence included unless ignored
    deadline: float | None  # on the gateway's monotonic clock
    trace: TraceParent
    tenant: str = DEFAULT_TENANT  # it finds this tenant's cached prefixes only

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def worst_case_tokens(self) -> int:
        return self.prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Attempt:
    """The work of one attempt, the same for both workers."""

    number: int  # 1, 2, …
    token_ids: tuple[int, ...] = field(repr=False)
    reserve_worst_case: bool
    choices: tuple[int, ...] = (0,)  # of the request that it computes, in order
    uncached: bool = False  # nothing is read from the prefix cache, which may hold the fault
    local: LocalPrefill = LocalPrefill.NO


def build_work(
    job: Job, attempt: Attempt, cache_namespace: bytes, now: float, waited_s: float = 0.0
) -> work_pb2.Work:
    """Return the message for ``attempt``, with the time left of the deadline at ``now``.

    ``waited_s``: seconds that the request spent in this gateway's queue.
    """
    request, sampling = job.request, job.request.sampling
    work = work_pb2.Work(
        id=work_pb2.AttemptId(request_id=job.work_id, attempt=attempt.number),
        token_ids=attempt.token_ids,
        prompt_tokens=job.prompt_tokens,
        sampling=work_pb2.Sampling(
            **{name: getattr(sampling, name) for name in SAMPLING_NUMBERS},
            logit_bias=sampling.logit_bias,
            allowed_token_ids=sampling.allowed_token_ids,
            bad_words=[work_pb2.TokenSequence(ids=word) for word in sampling.bad_words],
            logprobs=request.worker_logprobs,
            beam_width=request.beam_width or 0,
            grammar=_grammar(request),
        ),
        stopping=work_pb2.Stopping(
            max_tokens=job.max_tokens,
            min_tokens=min(request.min_tokens, job.max_tokens),
            stop_token_ids=job.stop_token_ids,
        ),
        cache_namespace=cache_namespace,
        cache_read=request.cache_read and not attempt.uncached,
        cache_write=request.cache_write,
        priority=request.priority,
        traceparent=job.trace.traceparent,
        tracestate=job.trace.tracestate,
        reserve_worst_case=attempt.reserve_worst_case,
        choices=attempt.choices,
        prompt_logprobs=request.prompt_logprobs,
        local_prefill=_LOCAL[attempt.local],
        adapter=b"" if request.adapter is None else request.adapter.digest,
    )
    if request.images is not None:
        for rows in request.images.image_rows(cache_namespace):
            work.images.add(
                first_position=rows.first,
                rows=rows.rows,
                digest=rows.digest,
                first_row=rows.first_row,
                columns=rows.columns,
            )
    if job.deadline is not None:
        work.time_left.FromNanoseconds(round(max(job.deadline - now, 0.0) * 1e9))
    if waited_s >= MIN_REPORTED_WAIT_S:
        work.waited.FromNanoseconds(round(waited_s * 1e9))
    return work


def _grammar(request: ParsedRequest) -> work_pb2.Grammar | None:
    if request.constraint is None:
        return None
    grammar = request.constraint.grammar
    return work_pb2.Grammar(kind=_KINDS[grammar.kind], text=grammar.text, after=_span(request))


def _span(request: ParsedRequest) -> work_pb2.ReasoningSpan | None:
    if request.reasoning is None:
        return None
    span = request.reasoning.span(forced=request.tools is not None and request.tools.forced)
    ends = [work_pb2.ReasoningSpan.Mark(ids=end.ids, until=end.until) for end in span.ends]
    return work_pb2.ReasoningSpan(open=span.open, opens=span.opens, ends=ends, leads=span.leads)
