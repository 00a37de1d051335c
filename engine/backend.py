"""The seam under the runner: who executes the forward pass of a step.

There are two: torch (engine/torch_backend.py, the meaning) and one native call for the whole step
(engine/native_backend.py). Both take the same batches and read and write the same paged blocks in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.batch import AbortWords, SequenceStep


class Backend(Protocol):
    """Executes steps of one model."""

    def forward(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> torch.Tensor:
        """Compute a step whose batch `check_batch` accepted, writing keys and values into the sequences'
        blocks.

        Returns float32 logits `[rows, vocab]`: for each sequence with `wants_logits`, in order, those after
        its last `trailing` tokens. `abort` is read between layers: a sequence whose word is set writes
        nothing from the next layer on, and its rows, if it has any, are NaN or what the pass gave, nobody may
        use them; when all are set the call returns early.
        """
        ...

    def set_threads(self, threads: int) -> None:
        """Use `threads` cores in calls from the calling thread."""
        ...
