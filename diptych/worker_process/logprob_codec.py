"""Conversions between the engine's values and the worker protocol: tokens, log-probabilities, failures."""

from __future__ import annotations

from typing import Final, cast

from diptych.engine.sampling import Candidate, Sampled, SampleFailure, TokenLogprob
from diptych.worker.v1 import work_pb2

HANDOFF_FAILURES: Final = frozenset(
    {
        work_pb2.FAILURE_REASON_KV_TRANSFER_FAILED,
        work_pb2.FAILURE_REASON_PEER_LOST,
        work_pb2.FAILURE_REASON_INCOMPATIBLE,
    }
)
"""The other reasons are the request's own, or the worker's: it is late, too large, or the worker drains."""


def encode_logprob(logprob: TokenLogprob) -> work_pb2.Score:
    """Return the message of a token's log-probability, rank and alternatives."""
    top = [work_pb2.Alternative(token_id=token, logprob=value) for token, value in logprob.top]
    return work_pb2.Score(logprob=logprob.logprob, rank=logprob.rank, top=top)


def decode_logprob(message: work_pb2.Score) -> TokenLogprob:
    """Return the inverse of `encode_logprob`, in the precision of the wire."""
    return TokenLogprob(
        message.logprob, message.rank, tuple((one.token_id, one.logprob) for one in message.top)
    )


def attach_timings(tokens: work_pb2.Tokens, times: work_pb2.PhaseTimes) -> None:
    """Attach an attempt's phases so far to its first token."""
    tokens.cached_tokens = times.cached_tokens
    tokens.times.CopyFrom(times)


def encode_sampled(sampled: Sampled) -> work_pb2.SampledToken:
    """Return the message of a choice's first token."""
    score = None if sampled.score is None else encode_logprob(sampled.score)
    return work_pb2.SampledToken(token_id=sampled.token_id, score=score)


def decode_sampled(message: work_pb2.SampledToken) -> Sampled:
    """Return the inverse of `encode_sampled`."""
    return Sampled(message.token_id, decode_logprob(message.score) if message.HasField("score") else None)


def encode_candidate(candidate: Candidate) -> work_pb2.SampledToken:
    """Return the message of a token that a beam may begin with."""
    score = None if candidate.score is None else encode_logprob(candidate.score)
    return work_pb2.SampledToken(token_id=candidate.token_id, score=score, beam_logprob=candidate.logprob)


def decode_candidate(message: work_pb2.SampledToken) -> Candidate:
    """Return the inverse of `encode_candidate`."""
    score = decode_logprob(message.score) if message.HasField("score") else None
    return Candidate(message.token_id, message.beam_logprob, score)


def failure_reason(failure: SampleFailure) -> work_pb2.FailureReason:
    """Return the reason with which a row that has no token ends its output."""
    if failure.by_request:
        return work_pb2.FAILURE_REASON_NO_VALID_TOKEN
    return work_pb2.FAILURE_REASON_COMPUTE_FAILED


def failure_name(reason: int) -> str:
    """Return `KV_TRANSFER_FAILED` and the like for spans: few values, and no address as in messages."""
    name = work_pb2.FailureReason.Name(cast("work_pb2.FailureReason", reason))
    return name.removeprefix("FAILURE_REASON_")
