"""The results of a step whose tokens may be sampled where the logits are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from diptych.engine.sampling import Sampled, SampleFailure, SampleRow


@dataclass(frozen=True)
class StepOutput:
    """A token for each row of logits that was sampled, and the logits of the others."""

    tokens: Sequence[Sampled | SampleFailure | None]
    """Tokens, one entry a row; None: its logits are in `logits`."""
    logits: torch.Tensor
    """Float32 `[rows that were not sampled, vocab]` on the CPU, in order."""

    @classmethod
    def logits_only(cls, logits: torch.Tensor) -> StepOutput:
        """Return the output of a step that sampled nothing, with logits `[rows, vocab]`."""
        return cls([None] * logits.shape[0], logits)


class Launched(Protocol):
    """A step that was launched on a backend."""

    def done(self) -> bool:
        """Return whether `collect` would not wait."""
        ...

    def collect(self) -> StepOutput:
        """Wait for the step and return its output; call it once, and in the order of the launches."""
        ...


def can_sample_on_device(row: SampleRow) -> SampleRow | None:
    """Return the row if a device can sample it; else None: the host has to, or more is asked for."""
    return row if row.params.on_device and not row.ruled else None
