"""The backend of rank 0: every step is computed by all ranks of the group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.engine.adapters.adapter import Adapter
from diptych.engine.backends.torch.hidden_rows import HiddenRows
from diptych.engine.backends.torch.parts_backend import PartsBackend
from diptych.engine.batch import AbortWords, SequenceStep, StepOutput
from diptych.engine.parallel.step_plan import make_plan
from diptych.worker_process.group.group_adapters import GroupAdapters
from diptych.worker_process.group.rank_group import RankGroup


class GroupBackend:
    """Executes steps with the other ranks: sends the plan, computes `own` parts, waits for the rest.

    A step ends when every rank has said that it writes no more. So what rank 0 then promises of its blocks
    (Pushed, Commit, Stopped) it promises for all ranks.
    """

    def __init__(self, own: PartsBackend, group: RankGroup) -> None:
        self._own, self._group = own, group
        self._adapters = GroupAdapters(own, group)

    def set_threads(self, threads: int) -> None:
        """See `PartsBackend.set_threads`; the other ranks have their cores from the start."""
        self._own.set_threads(threads)

    def allow_adapters(self, slots: int, max_rank: int) -> str | None:
        """See `AdapterBackend.allow_adapters`."""
        return self._adapters.allow(slots, max_rank)

    def prepare_adapter(self, adapter: Adapter) -> object:
        """See `GroupAdapters.prepare`."""
        return self._adapters.prepare(adapter)

    def set_adapter(self, slot: int, prepared: object | None) -> None:
        """See `GroupAdapters.set`."""
        self._adapters.set(slot, prepared)

    def give_hidden_rows(self) -> HiddenRows:
        """See `HiddenRowsBackend.give_hidden_rows`."""
        return HiddenRows(self)

    def give_features(self, layers: Sequence[int]) -> HiddenRows:
        """See `FeatureBackend.give_features`."""
        return HiddenRows(self, layers)

    def lacks_trees(self) -> str | None:
        """See `TreeBackend.lacks_trees`."""
        return self._own.lacks_trees()

    def forward(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> torch.Tensor:
        """See `Backend.forward`. An error within a step ends the process: the ranks are out of step then."""
        return self.forward_with_features(sequences, abort, None).logits

    def forward_with_features(
        self, sequences: Sequence[SequenceStep], abort: AbortWords | None, taps: Sequence[int] | None
    ) -> StepOutput:
        """See `WithFeatures.forward_with_features`; errors as in `forward`."""
        plan = make_plan(sequences, self._group.memories.number_of, taps=taps)
        self._group.stop_word.reset()
        try:
            self._adapters.forget_dropped()
            self._group.begin_step(plan)
            output = self._own.forward_with_features(sequences, abort, taps)
            self._group.end_step()
        except Exception as error:
            self._group.fail(error)
        return output
