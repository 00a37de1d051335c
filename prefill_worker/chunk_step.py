"""A step of the prefill engine, on its own thread: chunks in, first tokens and log-probabilities out."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.engine.batch import AbortWords
from diptych.engine.device import break_device
from diptych.engine.runner import Runner
from diptych.engine.sampling import Sampled, SampleFailure
from diptych.runtime.failpoints import failpoint
from diptych.worker_process.draft_chunks import PromptDrafts, draft_chunks
from diptych.worker_process.prompt_chunk import Computed, PromptChunk
from prefill_worker.request import PrefillRequest
from prefill_worker.scheduler import Chunk

Row = tuple[PrefillRequest, Chunk]


def run_step(
    runner: Runner, rows: Sequence[Row], abort: AbortWords, drafts: PromptDrafts | None = None
) -> list[Computed | SampleFailure]:
    """Compute the chunks, also for drafts if there are any; return one result a row."""
    chunks = [_chunk(request, chunk) for request, chunk in rows]
    sample_rows = [chunk.device_rows() for chunk in chunks]
    sequences = [chunk.sequence() for chunk in chunks]
    if failpoint("prefill.device_fault"):
        break_device(sequences[0].memory.data.device)
    output = runner.step_and_sample(sequences, [row for rows in sample_rows for row in rows], abort)
    if drafts is not None:
        drafts.compute(draft_chunks([request for request, _ in rows], sequences, output), abort)
    tokens, logits = iter(output.tokens), output.logits
    if len(logits) and failpoint("prefill.not_finite"):
        logits[-1] = float("nan")
    results: list[Computed | SampleFailure] = []
    begin = 0
    for chunk, row in zip(chunks, sample_rows, strict=True):
        token = _only_token([next(tokens) for _ in row])
        if token is not None:
            results.append(chunk.from_token(token))
            continue
        end = begin + len(row)
        results.append(chunk.from_logits(logits[begin:end]))
        begin = end
    return results


def _chunk(request: PrefillRequest, chunk: Chunk) -> PromptChunk:
    granted = request.granted
    if granted is None:  # the planner only names granted requests
        raise RuntimeError(f"{request.key} has no blocks")
    return PromptChunk(
        request.attempt,
        request.grammar,
        request.token_ids,
        granted.memory,
        granted.block_table,
        request.computed,
        chunk.tokens,
        request.adapter_slot,
        () if request.images is None else request.images.rows(request.computed, chunk.tokens),
        granted.window,
    )


def _only_token(tokens: Sequence[Sampled | SampleFailure | None]) -> Sampled | SampleFailure | None:
    """Return the token of a chunk's one row, if it was sampled."""
    return tokens[0] if len(tokens) == 1 else None
