"""The seam under the runner: who executes the forward pass of a step.

There are three: torch (diptych/engine/backends/torch/backend.py, the meaning), one native call for the whole step on a CPU
(diptych/engine/backends/native/backend.py), and Triton kernels on a GPU (diptych/engine/backends/triton/backend.py). All take the same batches
and read and write the same paged blocks in place. The last two can draw tokens, too, and take steps ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.sampling import SampleRow
from diptych.engine.step_output import Launched, StepOutput


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


@runtime_checkable
class CoreLendingBackend(Backend, Protocol):
    """A backend whose steps take in cores of others as they become free, and let go of them at once."""

    def assist(self, states: int, cores: Sequence[int]) -> None:
        """From the next step on. `states` is the address of a byte a core, see diptych/engine/shared_cores.py."""
        ...

    def welcome(self, after: float) -> None:
        """Which share of its layers a step has computed before it takes in such cores, from the next step on:
        0 is all the time, and so it is at first, 1 is never.
        """
        ...


@runtime_checkable
class SamplingBackend(Backend, Protocol):
    """A backend that draws tokens where the logits are: these are too much to bring from a device at every
    step, or to read once more when they have left the caches.
    """

    def forward_and_draw(
        self,
        sequences: Sequence[SequenceStep],
        draws: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> StepOutput:
        """As `forward`, with what to draw for each row of logits. None leaves the row's logits, and so does a
        row that this backend cannot draw.
        """
        ...


@runtime_checkable
class LaunchingBackend(SamplingBackend, Protocol):
    """A backend that is given steps ahead, and computes each from the moment the one before is over."""

    def launch(
        self,
        sequences: Sequence[SequenceStep],
        draws: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> Launched | None:
        """Begin a decode step and return; None, with nothing begun, if this batch has to be computed at once.

        One more may be launched before this one is collected: `SequenceStep.follows` names rows of this one.
        """
        ...

    def samples_on_device(self, row: SampleRow) -> bool:
        """Whether a step draws this row where its logits are, so that another one may follow it at once."""
        ...


@runtime_checkable
class CompletionFdBackend(LaunchingBackend, Protocol):
    """A backend that tells when a launched step is over, so that no thread has to wait for that."""

    @property
    def completions(self) -> int:
        """A file descriptor to which a byte comes whenever a launched step is over. It does not block."""
        ...


@runtime_checkable
class GraphBackend(LaunchingBackend, Protocol):
    """A backend that can launch only what it has recorded before."""

    def plan_decode(self, max_batch: int, block_size: int) -> int:
        """Take the memory that decode steps of up to `max_batch` rows need beside weights and blocks, but
        for that of the recordings themselves: how many there will be is returned.
        """
        ...

    def prepare_decode(self, memory: KVMemory) -> None:
        """Make ready to replay decode steps over `memory`; `plan_decode` came before. May take seconds."""
        ...
