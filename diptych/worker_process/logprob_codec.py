"""Tokens and what the model thought of them, as the workers write them to one another and to gateways."""

from __future__ import annotations

from diptych.engine.sampling import Candidate, Sampled, SampleFailure, TokenLogprob
from diptych.worker.v1 import work_pb2


def score_message(score: TokenLogprob) -> work_pb2.Score:
    """Logarithms, rank and alternatives."""
    top = [work_pb2.Alternative(token_id=token, logprob=logprob) for token, logprob in score.top]
    return work_pb2.Score(logprob=score.logprob, rank=score.rank, top=top)


def score_of(message: work_pb2.Score) -> TokenLogprob:
    """The inverse of `score_message`, in the precision of the wire."""
    return TokenLogprob(
        message.logprob, message.rank, tuple((one.token_id, one.logprob) for one in message.top)
    )


def tell_phases(tokens: work_pb2.Tokens, times: work_pb2.PhaseTimes) -> None:
    """They go with the first token of an attempt: what it took until then."""
    tokens.cached_tokens = times.cached_tokens
    tokens.times.CopyFrom(times)


def sampled_message(sampled: Sampled) -> work_pb2.SampledToken:
    """A choice's first token."""
    score = None if sampled.score is None else score_message(sampled.score)
    return work_pb2.SampledToken(token_id=sampled.token_id, score=score)


def sampled_of(message: work_pb2.SampledToken) -> Sampled:
    """The inverse of `sampled_message`."""
    return Sampled(message.token_id, score_of(message.score) if message.HasField("score") else None)


def candidate_message(candidate: Candidate) -> work_pb2.SampledToken:
    """A token that a beam may begin with."""
    score = None if candidate.score is None else score_message(candidate.score)
    return work_pb2.SampledToken(token_id=candidate.token_id, score=score, beam_logprob=candidate.logprob)


def candidate_of(message: work_pb2.SampledToken) -> Candidate:
    """The inverse of `candidate_message`."""
    score = score_of(message.score) if message.HasField("score") else None
    return Candidate(message.token_id, message.beam_logprob, score)


def failure_reason(failure: SampleFailure) -> work_pb2.FailureReason:
    """Why a row that has no token to give ends its output."""
    if failure.by_request:
        return work_pb2.FAILURE_REASON_NO_VALID_TOKEN
    return work_pb2.FAILURE_REASON_COMPUTE_FAILED
