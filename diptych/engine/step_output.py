"""What a step gives when tokens are drawn where the logits are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from diptych.engine.sampling import Sampled, SampleFailure, SampleRow


@dataclass(frozen=True)
class StepOutput:
    """A token for each row of logits that was drawn, and the logits of the others."""

    tokens: Sequence[Sampled | SampleFailure | None]
    """A row each; None: its logits are in `logits`."""
    logits: torch.Tensor
    """Float32 `[rows that were not drawn, vocab]` on the CPU, in order."""

    @classmethod
    def nothing(cls, logits: torch.Tensor) -> StepOutput:
        """A step after which every row has its logits."""
        return cls([None] * logits.shape[0], logits)


class Launched(Protocol):
    """A step that a device has been given."""

    def over(self) -> bool:
        """Whether `collect` would not wait."""
        ...

    def collect(self) -> StepOutput:
        """Wait for the step and read what it gave; once, and in the order of the launches."""
        ...


def can_sample_on_device(row: SampleRow) -> SampleRow | None:
    """Return the row, if a device can draw its token and only that is asked; else None: the host samples it."""
    return row if row.params.on_device and not row.ruled else None
