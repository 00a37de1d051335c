"""The Triton backend of rank 0 of a group: steps of all ranks, recorded and launched ahead.

A recorded decode step ends for rank 0 with the logits of all ranks. These come after each rank's keys and
values on its device, so that what rank 0 then promises of the step's blocks (Pushed, Commit, Stopped) it
promises for all. Of any other step, recorded prompts too, the ranks say that it is over, as where torch
computes (group_backend.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from diptych.engine.adapters.adapter import Adapter
from diptych.engine.backends.triton.cuda_graph import CaptureFailed
from diptych.engine.backends.triton.parts_backend import TritonPartsBackend
from diptych.engine.backends.triton.prompt_graphs import RECORDING_S, log_late
from diptych.engine.batch import AbortWords, DecodeRecording, Launched, SequenceStep, StepOutput
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.kv.window_groups import WindowGroups
from diptych.engine.parallel.step_plan import StepPlan, make_plan
from diptych.engine.sampling import SampleRow
from diptych.worker_process.group.group_adapters import GroupAdapters
from diptych.worker_process.group.native_group_backend import GroupStep
from diptych.worker_process.group.orders import (
    DropRecording,
    PlanDecode,
    PlanPrompts,
    RecordDecode,
    Recording,
    RecordPrompt,
    UseDecode,
)
from diptych.worker_process.group.rank_group import RankGroup

_Result = TypeVar("_Result")


class TritonGroupBackend:
    """Executes steps with the other ranks: sends the plan of each and computes `own` parts.

    An error within a step ends the process: the ranks are out of step then. A recording that a rank cannot
    capture is dropped by all.
    """

    def __init__(
        self, own: TritonPartsBackend, group: RankGroup, *, recording_s: float = RECORDING_S
    ) -> None:
        """Record prompt steps for `recording_s` seconds at most: after them none begins."""
        self._own, self._group, self._recording_s = own, group, recording_s
        self._adapters = GroupAdapters(own, group)

    def set_threads(self, threads: int) -> None:
        """Ignore `threads`: the host only launches."""

    def allow_adapters(self, slots: int, max_rank: int) -> str | None:
        """See `AdapterBackend.allow_adapters`."""
        return self._adapters.allow(slots, max_rank)

    def prepare_adapter(self, adapter: Adapter) -> object:
        """See `GroupAdapters.prepare`."""
        return self._adapters.prepare(adapter)

    def set_adapter(self, slot: int, prepared: object | None) -> None:
        """See `GroupAdapters.set`."""
        self._adapters.set(slot, prepared)

    def forward(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> torch.Tensor:
        """See `Backend.forward`."""
        rows = sum(step.logit_rows for step in sequences)
        return self.forward_and_sample(sequences, [None] * rows, abort).logits

    def forward_and_sample(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> StepOutput:
        """See `SamplingBackend.forward_and_sample`."""
        self._record_missing(sequences)
        return self._together(
            self._plan(sequences),
            lambda: self._own.forward_and_sample(sequences, rows, abort),
            answered=not self._own.launches(sequences),
        )

    def launch(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> Launched | None:
        """See `LaunchingBackend.launch`: what was recorded can be launched."""
        self._record_missing(sequences)
        if not self._own.launches(sequences):
            return None
        launched = self._together(
            self._plan(sequences), lambda: self._own.launch(sequences, rows, abort), answered=False
        )
        return None if launched is None else GroupStep(launched, self._group)

    def samples_on_device(self, row: SampleRow) -> bool:
        """See `LaunchingBackend.samples_on_device`."""
        return self._own.samples_on_device(row)

    def plan_decode(self, max_batch: int, block_size: int, *, windows: WindowGroups | None = None) -> int:
        """See `GraphBackend.plan_decode`; groups have no windowed tables."""
        order = PlanDecode(max_batch, block_size)
        return self._together(order, lambda: self._own.plan_decode(max_batch, block_size, windows=windows))

    def prepare_decode(self, memory: KVMemory) -> None:
        """See `GraphBackend.prepare_decode`."""
        order = UseDecode(self._group.memories.number_of(memory))
        for recording in self._together(order, lambda: self._own.use_decode(memory)):
            self._record_decode(recording)

    def _record_missing(self, sequences: Sequence[SequenceStep]) -> None:
        """Record what this decode step needs, as far as all ranks can."""
        while (missing := self._own.missing(sequences)) is not None:
            self._record_decode(missing)

    def _record_decode(self, recording: DecodeRecording) -> None:
        """Have all ranks record a decode step, or none."""
        why = self._recorded(RecordDecode(recording), partial(self._own.record_decode, recording))
        if why is not None:
            self._own.drop_decode(recording, why)

    def record_prompts(self, layout: KVLayout, most_tokens: int) -> int:
        """See `PromptGraphBackend.record_prompts`.

        This rank's clock decides before each recording, which all ranks make or none does.
        """
        end = time.monotonic() + self._recording_s
        plan = PlanPrompts(self._group.memories.layout_of_ranks(layout), most_tokens)
        planned = self._together(plan, lambda: self._own.plan_prompts(layout, most_tokens))
        for number in range(planned):
            if time.monotonic() > end:
                log_late(number, self._recording_s)
                return number
            why = self._recorded(RecordPrompt(number), partial(self._own.record_prompt, number))
            if why is not None:
                self._own.drop_prompt(number, why)
                return number
        return planned

    def _recorded(self, order: RecordDecode | RecordPrompt, record: Callable[[], None]) -> str | None:
        """Have all ranks make a recording, this one by `record`; return why one of them could not capture it:
        the others forget it then.
        """

        def agree() -> str | None:
            own = None
            try:
                record()
            except CaptureFailed as error:
                own = f"rank 0: {error}"
            others = self._group.end_recording()
            if (why := own or others) is not None:
                self._group.send_order(DropRecording(order, why))
            return why

        return self._together(order, agree, answered=False)

    def _plan(self, sequences: Sequence[SequenceStep]) -> StepPlan:
        return make_plan(sequences, self._group.memories.number_of)

    def _together(
        self, order: StepPlan | Recording, compute: Callable[[], _Result], *, answered: bool = True
    ) -> _Result:
        """Have all ranks carry out `order`, this one by `compute`; wait for answers where there are any."""
        # Only steps that are answered look at the word, and all before this one are over.
        self._group.stop_word.reset()
        try:
            self._adapters.forget_dropped()
            self._group.begin_step(order)
            result = compute()
            if answered:
                self._group.end_step()
        except Exception as error:
            self._group.fail(error)
        return result
