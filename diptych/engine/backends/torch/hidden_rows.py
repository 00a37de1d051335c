"""A torch backend whose outputs have hidden rows, and the inputs of some layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from diptych.engine.backend import Backend
from diptych.engine.batch import AbortWords, SequenceStep, StepOutput
from diptych.engine.sampling import SampleRow


class WithFeatures(Backend, Protocol):
    """A backend, of a whole model or of parts, that gives features of a step where they are asked for."""

    def forward_with_features(
        self, sequences: Sequence[SequenceStep], abort: AbortWords | None, taps: Sequence[int] | None
    ) -> StepOutput:
        """Return what `forward` does and, if not all sequences were aborted, hidden rows and the features of
        the layers `taps`; neither where these are None.
        """
        ...


class HiddenRows:
    """A `SamplingBackend` that samples nothing, over one that gives features."""

    def __init__(self, backend: WithFeatures, layers: Sequence[int] = ()) -> None:
        self._backend = backend
        self._layers = layers
        self.set_threads = backend.set_threads
        self.forward = backend.forward

    def forward_and_sample(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> StepOutput:
        """See `SamplingBackend.forward_and_sample`."""
        return self._backend.forward_with_features(sequences, abort, self._layers)
