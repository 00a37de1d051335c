"""The native step of one rank of a group, or of one process that computes all parts by itself.

Ranks of one host map the same KV memory, and each reads and writes the KV heads of its own parts. Within a
step the ranks exchange sums in memory that all of them map (kernels/cpu/rank_exchange.h), and a step ends for
each of them once all have written their keys and values. So nothing has to be said at its end.

Stages of a pipeline pass residual streams on between their steps (diptych/engine/parallel/pipeline.py). A
stage has a view of its layers of the same blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch

from diptych.engine.adapters.adapter import Adapter
from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.native.batch import Passing, positions_of
from diptych.engine.backends.native.share import Share
from diptych.engine.batch import AbortWords, Launched, SequenceStep, StepOutput
from diptych.engine.parallel.pipeline import Links, receive, send
from diptych.engine.sampling import SampleRow

_MOST_LAUNCHED = 2
"""Steps that a model computes or is about to; see `LaunchingBackend.launch`."""


class NativePartsBackend:
    """Executes a rank's parts of steps; every rank of a group must be given the same steps in one order."""

    def __init__(
        self,
        share: Share,
        dtype: torch.dtype,
        links: Links,
        *,
        threads: int,
        instruction_set: str | None = None,
    ) -> None:
        """Pack the weights of `share`, which may be freed afterwards. Every step has `threads` cores. `links`
        are the ends of a pipeline that this process holds; its ranks exchange within a step.

        Raises NativeUnavailable.
        """
        self._step = NativeBackend(share.whole, share, dtype, instruction_set)
        self._step.set_threads(threads)
        self._links, self._stage, self._shape = links, share.stage, share.whole
        self._is_whole = share.stage.is_first and share.stage.is_last
        self._followed: deque[Launched] = deque()

    @property
    def mixes_chunks(self) -> bool:
        """See `MixedStepBackend`: weights are read once for all rows of a step."""
        return True

    @property
    def completions(self) -> int:
        """See `CompletionFdBackend.completions`."""
        return self._step.completions

    def set_threads(self, threads: int) -> None:
        """Keep the cores that the rank has from the start."""

    def allow_adapters(self, slots: int, max_rank: int) -> str | None:
        """See `AdapterBackend.allow_adapters`."""
        return self._step.allow_adapters(slots, max_rank)

    def prepare_adapter(self, adapter: Adapter) -> object:
        """See `AdapterBackend.prepare_adapter`: packs what this rank's parts have of it."""
        return self._step.prepare_adapter(adapter)

    def set_adapter(self, slot: int, prepared: object | None) -> None:
        """See `AdapterBackend.set_adapter`. Waits for the steps that this rank follows: rank 0 knows of their
        ends before it does.
        """
        self._collect(leave=0)
        self._step.set_adapter(slot, prepared)

    def forward(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> torch.Tensor:
        """See `Backend.forward`. Rank 0 alone has an `abort`: once all sequences are aborted every rank of
        its stage stops before the same layer. Before that, the other ranks write one that is aborted.
        """
        if self._is_whole:
            return self._step.forward(sequences, abort)
        logits = self._forward_stage(sequences, abort)
        if abort is not None and abort.all_aborted():
            logits.fill_(torch.nan)  # the other stages computed with what there was
        return logits

    def forward_and_sample(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> StepOutput:
        """See `SamplingBackend.forward_and_sample`. The stages of a pipeline give the logits of all rows."""
        if not self._is_whole:
            return StepOutput.logits_only(self.forward(sequences, abort))
        return self._step.forward_and_sample(sequences, rows, abort)

    def samples_on_device(self, row: SampleRow) -> bool:
        """See `LaunchingBackend.samples_on_device`: the likeliest token, and no other."""
        return self._is_whole and self._step.samples_on_device(row)

    def launches(self, sequences: Sequence[SequenceStep], rows: Sequence[SampleRow | None]) -> bool:
        """Return whether `launch` begins this step: none of a pipeline, whose stages wait for each other."""
        return self._is_whole and self._step.launches(sequences, rows)

    def launch(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> Launched | None:
        """See `LaunchingBackend.launch`."""
        if not self._is_whole:
            return None
        return self._step.launch(sequences, rows, abort)

    def follow(self, sequences: Sequence[SequenceStep], greedy: bytes) -> bool:
        """Begin this rank's share of a step of rank 0's, after those that were begun before.

        `greedy` has a byte for each row of logits, 1 where its likeliest token is wanted. Returns while the
        step is computed, once the one before the last is; in a pipeline when it is over. False: rank 0 waits
        for no word of its end. Raises NativeError, GroupBroken.
        """
        if not self._is_whole:
            self._forward_stage(sequences, None)
            return False
        beyond = positions_of(sequences) > self._step.positions
        self._collect(leave=0 if beyond else _MOST_LAUNCHED - 1)
        self._followed.append(self._step.follow(sequences, greedy))
        return False

    def _collect(self, leave: int) -> None:
        while len(self._followed) > leave:
            self._followed.popleft().collect()

    def _forward_stage(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> torch.Tensor:
        """Compute this stage's layers; return the logits on the group's first process."""
        links, rows = self._links, sum(step.logit_rows for step in sequences)
        like = torch.zeros((sum(len(step.token_ids) for step in sequences), self._shape.hidden_size))
        passing = Passing(
            enters=None if links.before is None else receive(links.before, like),
            leaves=None if self._stage.is_last else torch.zeros_like(like),
        )
        if passing.leaves is not None:
            sequences = [replace(step, wants_logits=False) for step in sequences]
        logits = self._step.forward_stage(sequences, passing, abort)
        if links.after is not None and passing.leaves is not None:
            send(links.after, passing.leaves)  # even if the step has ended: the next stage waits for it
        if links.home is None:
            return logits
        if self._stage.is_last:
            send(links.home, logits)
            return logits
        return receive(links.home, torch.zeros((rows, self._shape.vocab_size)))
