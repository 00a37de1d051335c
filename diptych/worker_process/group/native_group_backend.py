"""The native backend of rank 0: every step is computed by all ranks of the group, and launched ahead.

A step that is over here has been written by every rank (diptych/engine/backends/native/parts_backend.py). So
what rank 0 then promises of its blocks (Pushed, Commit, Stopped) it promises for all ranks, and these say
nothing at the end of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from diptych.engine.adapters.adapter import Adapter
from diptych.engine.backends.native.every_row import compute_every_row
from diptych.engine.backends.native.parts_backend import NativePartsBackend
from diptych.engine.batch import AbortWords, Launched, SequenceStep, StepOutput
from diptych.engine.parallel.step_plan import make_plan
from diptych.engine.sampling import SampleRow
from diptych.worker_process.group.group_adapters import GroupAdapters
from diptych.worker_process.group.rank_group import RankGroup

_Result = TypeVar("_Result")


class NativeGroupBackend:
    """Executes steps with the other ranks: sends the plan of each and computes `own` parts.

    An error within a step ends the process: the ranks are out of step then.
    """

    def __init__(self, own: NativePartsBackend, group: RankGroup) -> None:
        self._own, self._group = own, group
        self._adapters = GroupAdapters(own, group)

    @property
    def mixes_chunks(self) -> bool:
        """See `MixedStepBackend`."""
        return self._own.mixes_chunks

    @property
    def completions(self) -> int:
        """See `CompletionFdBackend.completions`."""
        return self._own.completions

    def set_threads(self, threads: int) -> None:
        """Keep the cores that the ranks have from the start."""

    def allow_adapters(self, slots: int, max_rank: int) -> str | None:
        """See `AdapterBackend.allow_adapters`."""
        return self._adapters.allow(slots, max_rank)

    def prepare_adapter(self, adapter: Adapter) -> object:
        """See `GroupAdapters.prepare`."""
        return self._adapters.prepare(adapter)

    def set_adapter(self, slot: int, prepared: object | None) -> None:
        """See `GroupAdapters.set`."""
        self._adapters.set(slot, prepared)

    def give_hidden_rows(self) -> NativeGroupBackend:
        """See `HiddenRowsBackend.give_hidden_rows`: from the next step on."""
        self._own.give_hidden_rows()
        return self

    def give_features(self, layers: Sequence[int]) -> NativeGroupBackend:
        """See `FeatureBackend.give_features`: from the next step on."""
        self._own.give_features(layers)
        return self

    def lacks_trees(self) -> str | None:
        """See `TreeBackend.lacks_trees`."""
        return self._own.lacks_trees()

    def forward(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> torch.Tensor:
        """See `Backend.forward`."""
        rows = sum(step.logit_rows for step in sequences)
        return self._compute(sequences, bytes(rows), lambda: self._own.forward(sequences, abort))

    def forward_and_sample(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> StepOutput:
        """See `SamplingBackend.forward_and_sample`."""
        if self._own.widens(sequences):
            return compute_every_row(
                sequences, rows, lambda wide, draws: self.forward_and_sample(wide, draws, abort)
            )
        greedy = self._own.greedy(rows)
        return self._compute(sequences, greedy, lambda: self._own.forward_and_sample(sequences, rows, abort))

    def samples_on_device(self, row: SampleRow) -> bool:
        """See `LaunchingBackend.samples_on_device`."""
        return self._own.samples_on_device(row)

    def launch(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> Launched | None:
        """See `LaunchingBackend.launch`."""
        if not self._own.launches(sequences, rows):
            return None
        launched = self._compute(
            sequences, b"\x01" * len(rows), lambda: self._own.launch(sequences, rows, abort)
        )
        return None if launched is None else GroupStep(launched, self._group)

    def _compute(
        self, sequences: Sequence[SequenceStep], greedy: bytes, compute: Callable[[], _Result]
    ) -> _Result:
        plan = make_plan(sequences, self._group.memories.number_of, greedy, self._own.taps)
        try:
            self._adapters.forget_dropped()
            self._group.begin_step(plan)
            return compute()
        except Exception as error:
            self._group.fail(error)


class GroupStep:
    """A launched step of all ranks; see `diptych.engine.batch.Launched`."""

    def __init__(self, own: Launched, group: RankGroup) -> None:
        self._own, self._group = own, group

    def done(self) -> bool:
        """See `Launched.done`."""
        return self._own.done()

    def collect(self) -> StepOutput:
        """See `Launched.collect`."""
        try:
            return self._own.collect()
        except Exception as error:
            self._group.fail(error)
