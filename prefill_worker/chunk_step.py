"""A step of the prefill engine, on its own thread: chunks in, first tokens and log-probabilities out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diptych.engine.batch import AbortWords, SequenceStep, can_sample_on_device
from diptych.engine.beam_search import beam_candidates
from diptych.engine.runner import Runner
from diptych.engine.sampling import Sampled, SampleFailure, SampleRow, sample, token_logprobs
from diptych.runtime.failpoints import failpoint
from diptych.worker.v1 import work_pb2
from diptych.worker_process.attempt import Attempt
from diptych.worker_process.logprob_codec import encode_candidate, encode_logprob, encode_sampled
from prefill_worker.request import PrefillRequest
from prefill_worker.scheduler import Chunk

Row = tuple[PrefillRequest, Chunk]


@dataclass(frozen=True, slots=True)
class Computed:
    """The results of a chunk beside keys and values."""

    first_tokens: tuple[work_pb2.SampledToken, ...] = ()
    """First tokens, with the last chunk: one for each choice, in their order, or those of a beam search."""
    prompt_scores: tuple[work_pb2.Score, ...] = ()
    """Log-probabilities of the tokens that follow the chunk's own: the first is at position start + 1."""


def run_step(runner: Runner, rows: Sequence[Row], abort: AbortWords) -> list[Computed | SampleFailure]:
    """Compute the chunks; return one result a row."""
    sequences = [_sequence(request, chunk) for request, chunk in rows]
    sample_rows = [
        _device_rows(request, chunk, sequence)
        for (request, chunk), sequence in zip(rows, sequences, strict=True)
    ]
    output = runner.step_and_sample(sequences, [row for rows in sample_rows for row in rows], abort)
    tokens, logits = iter(output.tokens), output.logits
    if len(logits) and failpoint("prefill.not_finite"):
        logits[-1] = float("nan")
    results: list[Computed | SampleFailure] = []
    begin = 0
    for (request, chunk), row in zip(rows, sample_rows, strict=True):
        token = _only_token([next(tokens) for _ in row])
        if token is not None:
            results.append(_computed(request, token))
            continue
        end = begin + len(row)
        results.append(_read_logits(request, chunk, logits[begin:end]))
        begin = end
    return results


def _sequence(request: PrefillRequest, chunk: Chunk) -> SequenceStep:
    granted = request.granted
    if granted is None:  # the planner only names granted requests
        raise RuntimeError(f"{request.key} has no blocks")
    scored = _tokens_to_score(request, chunk) > 0
    return SequenceStep(
        memory=granted.memory,
        block_table=granted.block_table,
        start=request.computed,
        token_ids=request.token_ids[request.computed : request.computed + chunk.tokens],
        wants_logits=chunk.last or scored,
        trailing=chunk.tokens if scored else 1,
    )


def _device_rows(request: PrefillRequest, chunk: Chunk, sequence: SequenceStep) -> Sequence[SampleRow | None]:
    """Return, for each row of logits, how a device may sample its token; None: the host needs the logits.

    A device may sample the prompt's last row, if all choices sample alike and ask for nothing else.
    """
    attempt = request.attempt
    if sequence.logit_rows != 1 or not chunk.last or attempt.beam_width or _tokens_to_score(request, chunk):
        return [None] * sequence.logit_rows
    params, *others = attempt.choices.values()
    if any(other is not params for other in others):
        return [None]
    return [can_sample_on_device(attempt.sample_row(params, attempt.delivered_ids, request.grammar))]


def _only_token(tokens: Sequence[Sampled | SampleFailure | None]) -> Sampled | SampleFailure | None:
    """Return the token of a chunk's one row, if it was sampled."""
    return tokens[0] if len(tokens) == 1 else None


def _computed(request: PrefillRequest, token: Sampled | SampleFailure) -> Computed | SampleFailure:
    if isinstance(token, SampleFailure):
        return token
    return Computed((encode_sampled(token),) * len(request.attempt.choices))


def _tokens_to_score(request: PrefillRequest, chunk: Chunk) -> int:
    """Return how many of the prompt's tokens get a log-probability from the logits of this chunk."""
    if request.attempt.prompt_logprobs is None:
        return 0
    following = len(request.attempt.prompt_ids) - 1 - request.computed
    return max(0, min(chunk.tokens, following))


def _read_logits(request: PrefillRequest, chunk: Chunk, logits: torch.Tensor) -> Computed | SampleFailure:
    """Return the results of a chunk from its own rows of logits `[logit_rows, vocab]`."""
    scores: tuple[work_pb2.Score, ...] = ()
    if count := _tokens_to_score(request, chunk):
        following = request.token_ids[request.computed + 1 : request.computed + 1 + count]
        try:
            scored = token_logprobs(logits, following, request.attempt.prompt_logprobs or 0)
        except ValueError as error:
            return SampleFailure(str(error))
        scores = tuple(encode_logprob(score) for score in scored)
    if not chunk.last:
        return Computed(prompt_scores=scores)
    pick = _beam_candidates if request.attempt.beam_width else _first_tokens
    first = pick(request, logits[-1:])
    return first if isinstance(first, SampleFailure) else Computed(first, scores)


def _first_tokens(
    request: PrefillRequest, logits: torch.Tensor
) -> tuple[work_pb2.SampledToken, ...] | SampleFailure:
    """Return one token for each choice; choices that sample alike get the same one."""
    attempt = request.attempt
    tokens: dict[int, work_pb2.SampledToken] = {}
    for params in attempt.choices.values():
        if id(params) in tokens:
            continue
        (sampled,) = sample(logits, [attempt.sample_row(params, attempt.delivered_ids, request.grammar)])
        if isinstance(sampled, SampleFailure):
            return sampled
        tokens[id(params)] = encode_sampled(sampled)
    return tuple(tokens[id(params)] for params in attempt.choices.values())


def _beam_candidates(
    request: PrefillRequest, logits: torch.Tensor
) -> tuple[work_pb2.SampledToken, ...] | SampleFailure:
    attempt: Attempt = request.attempt
    row = attempt.sample_row(attempt.params, attempt.delivered_ids, request.grammar)
    (found,) = beam_candidates(logits, [row], attempt.beam_width, attempt.stop_token_ids)
    return found if isinstance(found, SampleFailure) else tuple(map(encode_candidate, found))
