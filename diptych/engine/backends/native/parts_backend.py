"""The native step of one rank of a group, or of one process that computes all parts by itself.

Ranks of one host map the same KV memory, and each reads and writes the KV heads of its own parts. Within a
step the ranks exchange sums in memory that all of them map (kernels/cpu/rank_exchange.h), and a step ends for
each of them once all have written their keys and values. So nothing has to be said at its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.native.batch import positions_of
from diptych.engine.backends.native.share import Share
from diptych.engine.batch import AbortWords, Launched, SequenceStep, StepOutput
from diptych.engine.sampling import SampleRow

_MOST_LAUNCHED = 2
"""Steps that a model computes or is about to; see `LaunchingBackend.launch`."""


class NativePartsBackend:
    """Executes a rank's parts of steps; every rank of a group must be given the same steps in one order."""

    def __init__(
        self, share: Share, dtype: torch.dtype, *, threads: int, instruction_set: str | None = None
    ) -> None:
        """Pack the weights of `share`, which may be freed afterwards. Every step has `threads` cores.

        Raises NativeUnavailable.
        """
        self._step = NativeBackend(share.whole, share, dtype, instruction_set)
        self._step.set_threads(threads)
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

    def forward(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> torch.Tensor:
        """See `Backend.forward`. Rank 0 alone has an `abort`: once all sequences are aborted every rank stops
        before the same layer. Before that, one that is aborted is written by the other ranks.
        """
        return self._step.forward(sequences, abort)

    def forward_and_sample(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> StepOutput:
        """See `SamplingBackend.forward_and_sample`."""
        return self._step.forward_and_sample(sequences, rows, abort)

    def samples_on_device(self, row: SampleRow) -> bool:
        """See `LaunchingBackend.samples_on_device`: the likeliest token, and no other."""
        return self._step.samples_on_device(row)

    def launches(self, sequences: Sequence[SequenceStep], rows: Sequence[SampleRow | None]) -> bool:
        """Return whether `launch` begins this step."""
        return self._step.launches(sequences, rows)

    def launch(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> Launched | None:
        """See `LaunchingBackend.launch`."""
        return self._step.launch(sequences, rows, abort)

    def follow(self, sequences: Sequence[SequenceStep], greedy: bytes) -> None:
        """Begin this rank's share of a step of rank 0's, after those that were begun before.

        `greedy` has a byte for each row of logits, 1 where its likeliest token is wanted. Returns while the
        step is computed, once the one before the last is. Raises NativeError.
        """
        beyond = positions_of(sequences) > self._step.positions
        while len(self._followed) >= (1 if beyond else _MOST_LAUNCHED):
            self._followed.popleft().collect()
        self._followed.append(self._step.follow(sequences, greedy))
