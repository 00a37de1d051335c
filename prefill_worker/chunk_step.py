"""One step of the prefill engine, on its own thread: chunks in, first tokens and scores of the prompt out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diptych.worker.v1 import work_pb2
from engine.batch import AbortWords, SequenceStep
from engine.beam_search import candidates_wanted
from engine.runner import Runner
from engine.sampling import SampleFailure, candidates, sample, score_tokens
from prefill_worker.request import PrefillRequest
from prefill_worker.scheduler import Chunk
from runtime.failpoints import failpoint
from worker.attempt import Attempt
from worker.scored_tokens import candidate_message, sampled_message, score_message

Row = tuple[PrefillRequest, Chunk]


@dataclass(frozen=True, slots=True)
class Computed:
    """What a chunk gave beside keys and values."""

    first_tokens: tuple[work_pb2.SampledToken, ...] = ()
    """With the last chunk: one for each choice, in their order, or what a beam search starts from."""
    prompt_scores: tuple[work_pb2.Score, ...] = ()
    """Of the tokens that follow the chunk's own: the first is that of position start + 1."""


def run_step(runner: Runner, rows: Sequence[Row], abort: AbortWords) -> list[Computed | SampleFailure]:
    """Compute the chunks; one result a row."""
    sequences = [_sequence(request, chunk) for request, chunk in rows]
    logits = runner.step(sequences, abort)
    if len(logits) and failpoint("prefill.not_finite"):
        logits[-1] = float("nan")
    results: list[Computed | SampleFailure] = []
    begin = 0
    for (request, chunk), sequence in zip(rows, sequences, strict=True):
        end = begin + sequence.logit_rows
        results.append(_read(request, chunk, logits[begin:end]))
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


def _tokens_to_score(request: PrefillRequest, chunk: Chunk) -> int:
    """How many of the prompt's tokens are judged by the logits of this chunk."""
    if request.attempt.prompt_logprobs is None:
        return 0
    following = len(request.attempt.prompt_ids) - 1 - request.computed
    return max(0, min(chunk.tokens, following))


def _read(request: PrefillRequest, chunk: Chunk, logits: torch.Tensor) -> Computed | SampleFailure:
    """`logits` are the chunk's own rows, `[logit_rows, vocab]`."""
    scores: tuple[work_pb2.Score, ...] = ()
    if count := _tokens_to_score(request, chunk):
        judged = request.token_ids[request.computed + 1 : request.computed + 1 + count]
        try:
            scored = score_tokens(logits, judged, request.attempt.prompt_logprobs or 0)
        except ValueError as error:
            return SampleFailure(str(error))
        scores = tuple(score_message(score) for score in scored)
    if not chunk.last:
        return Computed(prompt_scores=scores)
    pick = _beam_candidates if request.attempt.beam_width else _first_tokens
    first = pick(request, logits[-1:])
    return first if isinstance(first, SampleFailure) else Computed(first, scores)


def _first_tokens(
    request: PrefillRequest, logits: torch.Tensor
) -> tuple[work_pb2.SampledToken, ...] | SampleFailure:
    """One token for each choice; those that draw alike get the same one."""
    attempt = request.attempt
    tokens: dict[int, work_pb2.SampledToken] = {}
    for params in attempt.choices.values():
        if id(params) in tokens:
            continue
        (sampled,) = sample(logits, [attempt.sample_row(params, attempt.delivered_ids, request.grammar)])
        if isinstance(sampled, SampleFailure):
            return sampled
        tokens[id(params)] = sampled_message(sampled)
    return tuple(tokens[id(params)] for params in attempt.choices.values())


def _beam_candidates(
    request: PrefillRequest, logits: torch.Tensor
) -> tuple[work_pb2.SampledToken, ...] | SampleFailure:
    attempt: Attempt = request.attempt
    row = attempt.sample_row(attempt.params, attempt.delivered_ids, request.grammar)
    count = candidates_wanted(attempt.beam_width, attempt.stop_token_ids)
    (found,) = candidates(logits, [row], count)
    return found if isinstance(found, SampleFailure) else tuple(map(candidate_message, found))
