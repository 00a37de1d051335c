"""Decode steps, the next one prepared and launched while the device computes the present one.

The next step is planned as if no token of the present one ended its sequence; the tokens stay on the device.
Only then are those of the present step read, and streamed out while the device computes the next. A sequence
that has ended meanwhile has a row too many in that step: its result is dropped, and its blocks are released
after it, as those of a sequence that is cancelled during a step are.

A step is launched ahead only if it needs no decision: the device samples every row of the present step, and
every sequence finds its blocks without a preemption. Else the next step waits for the present one, as it does
on backends that launch nothing: there one step follows the other. Drafts follow tokens that are known: a step
that may have some (speculation.py) waits as well, and begins on the engine's thread, where they are made. Nor
does a step follow one with chunks of prompts that this worker computes itself (local_prefill.py): what they
begin joins the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from decode_worker.local_prefill import LocalPrompt
from decode_worker.speculation import Speculation
from decode_worker.step_group import OwnedRow, Row, RowOwner, StepGroup, keep_hidden_rows, pick_all
from diptych.engine.batch import AbortWords, Launched, SequenceStep, StepOutput
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.runner import Runner
from diptych.engine.sampling import SampleRow
from diptych.runtime.failpoints import failpoint
from diptych.worker_process.draft_chunks import PromptDrafts, draft_chunks
from diptych.worker_process.step_thread import InFlight, StepThread

_log = logging.getLogger(__name__)

_EVENT_BYTES = 4096  # read at once, one a step


@dataclass(eq=False)
class _Step:
    """A step, laid out; `launched` once the device has it."""

    batch: Sequence[StepGroup]
    prompts: Sequence[LocalPrompt]
    decoding: Sequence[Row]
    """The rows of `batch`."""
    rows: Sequence[OwnedRow]
    """Rows of `batch`, then those of `prompts`."""
    sequences: Sequence[SequenceStep]
    sample_rows: Sequence[SampleRow | None]
    flight: InFlight[RowOwner]
    tokens: int
    """Rows of logits, at most."""
    drafting: bool
    """True until its drafts are made, on the engine's thread: there it is laid out again."""
    launched: Launched | None = None


class Pipeline:
    """Runs batches until the next one cannot be known before the present one is done."""

    def __init__(
        self,
        runner: Runner,
        memory: KVMemory,
        thread: StepThread[RowOwner],
        *,
        plan_ahead: Callable[[Sequence[StepGroup]], Sequence[StepGroup]],
        apply: Callable[[Sequence[RowOwner], Sequence[Any]], None],
        release_blocks: Callable[[StepGroup], None],
        speculation: Speculation | None = None,
        draft_chunks: PromptDrafts | None = None,
    ) -> None:
        """Take the callbacks of the engine loop.

        `draft_chunks` gets the chunks of prompts that this worker computes itself.

        `plan_ahead` returns the batch after one that is being computed, its blocks included, or an empty one.
        `apply` gets the owners and results of every step, groups before prompts. `release_blocks` gets the
        step groups that ended during a step that was planned and not launched.
        """
        self._runner = runner
        self._memory = memory
        self._thread = thread
        self._plan_ahead = plan_ahead
        self._apply = apply
        self._release_blocks = release_blocks
        self._speculation = speculation
        self._draft_chunks = draft_chunks
        self._launched: list[_Step] = []  # and not collected
        self._events = None if runner.completions is None else StepEvents(runner.completions)

    def close(self) -> None:
        """Wait for launched steps, which write to the pool, once the engine's thread has ended."""
        if self._events is not None:
            self._events.close()
        for step in list(self._launched):
            self._drop(step)

    async def run(self, batch: Sequence[StepGroup], prompts: Sequence[LocalPrompt] = ()) -> None:
        """Compute a step of `batch` and `prompts`, and all steps that can be launched ahead of its end."""
        present: _Step | None = self._lay_out(batch, {}, prompts)
        while present is not None:
            following = self._following(present)
            picked = await self._thread.await_rows(
                present.flight,
                present.rows,
                partial(self._compute, present, following),
                tokens=present.tokens,
                completion=partial(self._await_completion, present, following),
            )
            self._thread.end(present.flight)
            if following is not None and following.launched is None:
                self._withdraw(present, following)
                following = None
            self._apply([*present.batch, *present.prompts], picked)
            present = following

    def _lay_out(
        self, batch: Sequence[StepGroup], before: dict[int, int], prompts: Sequence[LocalPrompt] = ()
    ) -> _Step:
        """Lay out a step of `batch`; `before` has the rows of sequences (by id) in the present step."""
        decoding: list[Row] = [(group, row) for group in batch for row in group.rows]
        drafting = (
            self._speculation is not None
            and bool(decoding)
            and not before
            and self._speculation.reserve(decoding)
        )
        rows: list[OwnedRow] = [*decoding, *((prompt, row) for prompt in prompts for row in prompt.rows)]
        sequences = [row.step(self._memory, before.get(id(row))) for _, row in rows]
        sample_rows = _sample_rows(rows)
        flight = self._thread.begin([owner for owner, _ in rows])
        tokens = len(sample_rows)
        if drafting:
            tokens += sum(sequence.lanes for _, sequence in decoding)
        return _Step(batch, prompts, decoding, rows, sequences, sample_rows, flight, tokens, drafting)

    def _following(self, present: _Step) -> _Step | None:
        """Lay out the step after `present`, if it can be known by now."""
        if present.prompts or present.drafting:
            return None
        if not all(row is not None and self._runner.samples_on_device(row) for row in present.sample_rows):
            return None
        if self._speculation is not None and self._speculation.needs_tokens(present.decoding):
            return None
        batch = self._plan_ahead(present.batch)
        before = {id(row): number for number, (_, row) in enumerate(present.rows)}
        return self._lay_out(batch, before) if batch else None

    def _withdraw(self, present: _Step, following: _Step) -> None:
        """Release the step groups that ended meanwhile and only `following`, which was not launched, held."""
        self._thread.end(following.flight)
        for group in following.batch:
            if group.ended and not any(group is one for one in present.batch):
                self._release_blocks(group)

    async def _await_completion(self, present: _Step, following: _Step | None) -> bool:
        """Launch both steps, and wait for the first; return False where the engine's thread has to."""
        if self._events is None or present.drafting:
            return False
        self._launch_both(present, following)
        if present.launched is None:
            return False
        await self._events.wait(present.launched)
        return True

    # ---- on the engine's thread, or where nothing is left to wait for ---------------------------------

    def _compute(
        self, present: _Step, following: _Step | None, rows: Sequence[OwnedRow], abort: AbortWords
    ) -> Sequence[Any]:
        """Return the results of `rows`: of the present step, or of some of it, which are tried again."""
        if rows is not present.rows:  # on the engine's thread, always
            if following is not None:
                self._drop(following)
            for _, row in rows:
                row.draft = []  # it may be the cause of the failure
            sequences = [row.step(self._memory, None) for _, row in rows]
            return self._step(sequences, _sample_rows(rows), abort, rows)
        if present.drafting and self._speculation is not None:
            self._draft(present, self._speculation)
            return self._drafted_step(present, abort, self._speculation)
        self._launch_both(present, following)
        if present.launched is None:
            return self._step(present.sequences, present.sample_rows, abort, rows)
        return _picked(self._collect(present.launched, present), rows, present.sequences)

    def _drafted_step(self, step: _Step, abort: AbortWords, speculation: Speculation) -> Sequence[Any]:
        """Compute a step with its drafts, and record how long it took."""
        started = time.monotonic()
        results = self._step(step.sequences, step.sample_rows, abort, step.rows)
        if not step.prompts:
            tokens = sum(len(one.token_ids) for one in step.sequences)
            speculation.record_step(len(step.decoding), tokens, time.monotonic() - started)
        return results

    def _step(
        self,
        sequences: Sequence[SequenceStep],
        sample_rows: Sequence[SampleRow | None],
        abort: AbortWords,
        rows: Sequence[OwnedRow],
    ) -> Sequence[Any]:
        """Compute `sequences`, the shares of `rows`, and return the results of each row."""
        output = self._runner.step_and_sample(sequences, sample_rows, abort)
        if self._draft_chunks is not None:
            every = draft_chunks([owner for owner, _ in rows], sequences, output)
            chunks = [
                chunk for chunk in every if isinstance(chunk.owner, LocalPrompt) and not chunk.owner.revoked
            ]
            if chunks:
                self._draft_chunks.compute(chunks)
        return _picked(output, rows, sequences)

    def _draft(self, step: _Step, speculation: Speculation) -> None:
        """Make the drafts of a step, and lay it out with them."""
        speculation.draft(step.decoding)
        step.sequences = [row.step(self._memory, None) for _, row in step.rows]
        step.sample_rows = _sample_rows(step.rows)
        step.drafting = False

    def _launch_both(self, present: _Step, following: _Step | None) -> None:
        """Launch those of the two steps that can be launched, and are not yet."""
        if present.launched is None and self._runner.launches and not present.prompts:
            self._launch(present)
        if present.launched is not None and following is not None and following.launched is None:
            self._launch_ahead(following)

    def _launch(self, step: _Step) -> None:
        step.launched = self._runner.launch(step.sequences, step.sample_rows, step.flight.abort)
        if step.launched is not None:
            self._launched.append(step)

    def _launch_ahead(self, following: _Step) -> None:
        """Launch the following step. A failure is only logged: it fails again as the present step."""
        try:
            self._launch(following)
        except Exception:
            _log.exception("a step of %d rows could not be launched ahead", len(following.rows))

    def _collect(self, launched: Launched, step: _Step) -> StepOutput:
        self._launched.remove(step)
        return launched.collect()

    def _drop(self, step: _Step) -> None:
        """Drop a step that followed tokens of a failed one. The device may write until it is done."""
        if step.launched is None:
            return
        try:
            self._collect(step.launched, step)
        except Exception:
            _log.exception("a dropped step failed")
        step.launched = None


class StepEvents:
    """Ends of a backend's launched steps (`diptych.engine.backend.CompletionFdBackend`) on the event loop.

    No thread has to wake up to report that a step is done.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._readable = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def wait(self, step: Launched) -> None:
        """Return when `step.collect` would not wait. One caller at a time."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._descriptor, self._on_readable)
        while True:
            self._readable.clear()
            if step.done():  # checked after clearing: no end of a step is missed
                await asyncio.sleep(0)  # else steps shorter than the work between them starve the loop
                return
            await self._readable.wait()

    def close(self) -> None:
        """Stop reading. Any thread may call it."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(loop.remove_reader, self._descriptor)

    def _on_readable(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, _EVENT_BYTES)
        self._readable.set()


def _sample_rows(rows: Sequence[OwnedRow]) -> Sequence[SampleRow | None]:
    """Return how a device may sample each row of logits."""
    return [sample_row for group, row in rows for sample_row in group.device_rows(row)]


def _picked(output: StepOutput, rows: Sequence[OwnedRow], sequences: Sequence[SequenceStep]) -> Sequence[Any]:
    if None in output.tokens and failpoint("decode.not_finite"):
        output.logits[0] = float("nan")
    keep_hidden_rows(output, rows, sequences)
    return pick_all(output, rows)
