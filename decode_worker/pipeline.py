"""Decode steps, the next one prepared and launched while the device computes the present one.

The next step is planned as if no token of the present one ended its sequence; the tokens stay on the device.
Only then are those of the present step read, and streamed out while the device computes the next. A sequence
that has ended meanwhile has a row too many in that step: its result is dropped, and its blocks are given back
after it, as those of a sequence that is cancelled during a step are.

Only what needs no decision is launched ahead: every row of the present step is drawn by the device, and every
sequence finds its blocks without anything being taken from anybody. Else the next step waits for the present
one, as it does on devices that launch nothing: there this is one step after the other. Drafts follow tokens
that are known: a step that may have some (speculation.py) waits as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from decode_worker.sequence import DecodeSequence
from decode_worker.speculation import Speculation
from decode_worker.step_events import StepEvents
from decode_worker.step_group import Row, StepGroup, pick_all
from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.runner import Runner
from diptych.engine.sampling import SampleRow
from diptych.engine.step_output import Launched, StepOutput
from diptych.runtime.failpoints import failpoint
from diptych.worker_process.step_thread import InFlight, StepThread

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Step:
    """One step, laid out; `launched` once the device has it."""

    batch: Sequence[StepGroup]
    rows: Sequence[Row]
    sequences: Sequence[SequenceStep]
    draws: Sequence[SampleRow | None]
    flight: InFlight[StepGroup]
    launched: Launched | None = None


class Pipeline:
    """Runs batches until the next one cannot be known before the present one is over."""

    def __init__(
        self,
        runner: Runner,
        memory: KVMemory,
        thread: StepThread[StepGroup],
        *,
        plan_ahead: Callable[[Sequence[StepGroup]], Sequence[StepGroup]],
        apply: Callable[[Sequence[StepGroup], Sequence[Any]], None],
        let_go: Callable[[StepGroup], None],
        speculation: Speculation | None = None,
    ) -> None:
        """`plan_ahead` gives the batch after one that is being computed, its blocks included; none: nothing
        can be planned. `apply` hears of every step's results, `let_go` of gangs that ended during a step
        that was planned and not launched.
        """
        self._runner = runner
        self._memory = memory
        self._thread = thread
        self._plan_ahead = plan_ahead
        self._apply = apply
        self._let_go = let_go
        self._speculation = speculation
        self._begun: list[_Step] = []  # launched and not collected
        self._completions = None if runner.completions is None else StepEvents(runner.completions)

    def close(self) -> None:
        """Wait for what was launched, once the thread is at its end: it writes to our memory."""
        if self._completions is not None:
            self._completions.close()
        for step in list(self._begun):
            self._drop(step)

    async def run(self, batch: Sequence[StepGroup]) -> None:
        """Compute a step of `batch`, and all that can be launched ahead of its end."""
        present: _Step | None = self._lay_out(batch, {})
        while present is not None:
            following = self._following(present)
            picked = await self._thread.await_rows(
                present.flight,
                present.rows,
                partial(self._compute, present, following),
                tokens=len(present.draws),
                computed=partial(self._computed, present, following),
            )
            self._thread.end(present.flight)
            if following is not None and following.launched is None:
                self._withdraw(present, following)
                following = None
            self._apply(present.batch, picked)
            present = following

    def _lay_out(self, batch: Sequence[StepGroup], before: dict[int, int]) -> _Step:
        """A step of `batch`; `before` says which row of the present step a sequence (by id) has."""
        rows = [(gang, row) for gang in batch for row in gang.rows]
        if self._speculation is not None and not before:
            self._speculation.draft(rows)
        sequences = [self._sequence(row, before.get(id(row))) for _, row in rows]
        draws = _draws(rows)
        flight = self._thread.begin([gang for gang, _ in rows])
        return _Step(batch, rows, sequences, draws, flight)

    def _sequence(self, row: DecodeSequence, follows: int | None) -> SequenceStep:
        unknown = int(follows is not None)
        return SequenceStep(
            memory=self._memory,
            block_table=row.block_ids,
            start=row.num_tokens - 1 + unknown,
            token_ids=row.output_ids[-1:] + row.draft,
            wants_logits=True,
            trailing=1 + len(row.draft),
            follows=follows,
        )

    def _following(self, present: _Step) -> _Step | None:
        """The step after `present`, if it can be known by now."""
        if not all(draw is not None and self._runner.samples_on_device(draw) for draw in present.draws):
            return None
        if self._speculation is not None and self._speculation.waits(present.rows):
            return None
        batch = self._plan_ahead(present.batch)
        before = {id(row): number for number, (_, row) in enumerate(present.rows)}
        return self._lay_out(batch, before) if batch else None

    def _withdraw(self, present: _Step, following: _Step) -> None:
        """`following` was not launched: whoever ended meanwhile and is not in `present` waits for nothing."""
        self._thread.end(following.flight)
        for gang in following.batch:
            if gang.ended and not any(gang is one for one in present.batch):
                self._let_go(gang)

    async def _computed(self, present: _Step, following: _Step | None) -> bool:
        """Launch both, and wait for the first; False where that is for the engine's thread to do."""
        if self._completions is None:
            return False
        self._launch_both(present, following)
        if present.launched is None:
            return False
        await self._completions.over(present.launched)
        return True

    # ---- on the engine's thread, or where nothing is left to wait for ---------------------------------

    def _compute(
        self, present: _Step, following: _Step | None, rows: Sequence[Row], abort: AbortWords
    ) -> Sequence[Any]:
        """The results of `rows`: of the present step, or of some of it, which are tried again."""
        if rows is not present.rows:  # on the engine's thread, always
            if following is not None:
                self._drop(following)
            for _, row in rows:
                row.draft = []  # it may be what this failed of
            sequences = [self._sequence(row, None) for _, row in rows]
            draws = _draws(rows)
            return _picked(self._runner.step_and_draw(sequences, draws, abort), rows)
        self._launch_both(present, following)
        if present.launched is None:
            return _picked(self._runner.step_and_draw(present.sequences, present.draws, abort), rows)
        return _picked(self._collect(present.launched, present), rows)

    def _launch_both(self, present: _Step, following: _Step | None) -> None:
        """Those that can be launched, and are not yet."""
        if present.launched is None and self._runner.launches:
            self._launch(present)
        if present.launched is not None and following is not None and following.launched is None:
            self._launch_ahead(following)

    def _launch(self, step: _Step) -> None:
        step.launched = self._runner.launch(step.sequences, step.draws, step.flight.abort)
        if step.launched is not None:
            self._begun.append(step)

    def _launch_ahead(self, following: _Step) -> None:
        """What fails here fails again when its turn comes, and is looked into then."""
        try:
            self._launch(following)
        except Exception:
            _log.exception("a step of %d rows could not be launched ahead", len(following.rows))

    def _collect(self, launched: Launched, step: _Step) -> StepOutput:
        self._begun.remove(step)
        return launched.collect()

    def _drop(self, step: _Step) -> None:
        """It went on from tokens that are not to be trusted. The device may write until it is through."""
        if step.launched is None:
            return
        try:
            self._collect(step.launched, step)
        except Exception:
            _log.exception("a step that is dropped failed")
        step.launched = None


def _draws(rows: Sequence[Row]) -> Sequence[SampleRow | None]:
    """One a row of logits."""
    return [draw for gang, row in rows for draw in gang.draws(row)]


def _picked(drawn: StepOutput, rows: Sequence[Row]) -> Sequence[Any]:
    if None in drawn.tokens and failpoint("decode.not_finite"):
        drawn.logits[0] = float("nan")
    return pick_all(drawn, rows)
