"""The interface of backends, which execute the forward pass of a step under the runner.

There are three, in diptych/engine/backends: torch (the reference), native (one C++ call for the whole step on
a CPU) and triton (kernels on a GPU). All take the same batches and read and write the same paged blocks in
place. The last two can sample tokens, too, and launch steps ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from diptych.engine.adapters.adapter import Adapter
from diptych.engine.batch import AbortWords, Launched, SequenceStep, StepOutput
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.kv.window_groups import WindowGroups
from diptych.engine.sampling import SampleRow


class Backend(Protocol):
    """Executes steps of one model."""

    def forward(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> torch.Tensor:
        """Compute a step whose batch `check_batch` accepted, writing keys and values into the sequences'
        blocks.

        Returns float32 logits `[rows, vocab]`: for each sequence with `wants_logits`, in order, those after
        its last `trailing` tokens. `abort` is read between layers: a sequence whose word is set writes
        nothing from the next layer on, and its rows, if it has any, are NaN or the pass's own numbers, which
        must not be used; when all words are set the call returns early.
        """
        ...

    def set_threads(self, threads: int) -> None:
        """Use `threads` cores in calls from the calling thread."""
        ...


@runtime_checkable
class TwinBackend(Backend, Protocol):
    """A backend whose weights a second one of the same process can compute with."""

    def twin(self) -> Backend:
        """Return a backend over the same weights; its buffers, adapters and recordings are its own.

        Steps of the two may be computed at the same time, each by one thread.
        """
        ...


@runtime_checkable
class CoreLendingBackend(Backend, Protocol):
    """A backend whose steps take in cores of other workers as they become idle, and release them at once."""

    def use_idle_cores(self, states: int, cores: Sequence[int]) -> None:
        """Borrow `cores` while they are idle, from the next step on.

        `states` is the address of a byte a core (diptych/engine/shared_cores.py).
        """
        ...

    def use_idle_cores_after(self, share: float) -> None:
        """Set the share of its layers that a step computes before it borrows cores, from the next step on:
        0, the default, borrows from the first layer on, 1 never.
        """
        ...


@runtime_checkable
class MixedStepBackend(Backend, Protocol):
    """A backend to which a step of decode rows and chunks of prompts costs no more than two steps.

    The others group such a step by kind, or compute it without their recorded decode steps.
    """

    @property
    def mixes_chunks(self) -> bool:
        """True; its presence is what counts."""
        ...


@runtime_checkable
class AdapterBackend(Backend, Protocol):
    """A backend that computes rows with LoRA adapters (`SequenceStep.adapter`) beside rows of the base.

    A row has the bits that it would have beside any other rows. Steps without such rows cost nothing more.
    """

    def allow_adapters(self, slots: int, max_rank: int) -> str | None:
        """Prepare for adapters of rank up to `max_rank` in slots `0 .. slots - 1`; call it once, before any
        step.

        Returns what the backend lacks, in words, if it computes none for this model; else None. Takes no
        memory before the first `set_adapter`.
        """
        ...

    def prepare_adapter(self, adapter: Adapter) -> object:
        """Return an adapter as `set_adapter` takes it, in host memory. Any thread may call it."""
        ...

    def set_adapter(self, slot: int, prepared: object | None) -> None:
        """Let the steps that follow find `prepared` in a slot; None empties it.

        No step that was launched and not collected may read the slot.
        """
        ...


@runtime_checkable
class WeighedBackend(Backend, Protocol):
    """A backend that knows what its steps read of the weights."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a step reads: all but the embedding, of which it reads a row a token."""
        ...

    @property
    def expert_bytes(self) -> int:
        """Bytes of `weight_bytes` that belong to experts among which rows choose."""
        ...


@runtime_checkable
class TreeBackend(Backend, Protocol):
    """A backend that computes trees of tokens (`SequenceStep.parents`)."""

    def lacks_trees(self) -> str | None:
        """Return None if trees are computed for this model, else what is lacking, in words."""
        ...


@runtime_checkable
class SamplingBackend(Backend, Protocol):
    """A backend that samples tokens where the logits are: these are too much to bring from a device at every
    step, or to read once more when they have left the caches.
    """

    def forward_and_sample(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> StepOutput:
        """Compute a step as `forward` does, and sample a token for each entry of `rows`, one a row of logits.

        None leaves the row's logits, and so does a row that this backend cannot sample.
        """
        ...


@runtime_checkable
class HiddenRowsBackend(Backend, Protocol):
    """A backend that gives the rows behind the final norm beside logits: what drafting heads read."""

    def give_hidden_rows(self) -> SamplingBackend:
        """Return the backend, perhaps this one, whose outputs have the rows (`StepOutput.hidden`)."""
        ...


@runtime_checkable
class FeatureBackend(Backend, Protocol):
    """A backend that gives the residual stream before some layers, or behind all: what EAGLE heads read."""

    def give_features(self, layers: Sequence[int]) -> SamplingBackend:
        """Return the backend, perhaps this one, whose outputs have them (`StepOutput.features`).

        The number behind that of the last layer stands for the stream behind the final norm.
        """
        ...


@runtime_checkable
class EmbeddingBackend(Protocol):
    """A backend that has the whole embedding, and not a share of it."""

    @property
    def embedding(self) -> torch.Tensor:
        """The model's embedding, `[vocab, hidden]`."""
        ...


@runtime_checkable
class LaunchingBackend(SamplingBackend, Protocol):
    """A backend that is given steps ahead, and computes each from the moment the one before is done."""

    def launch(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[SampleRow | None],
        abort: AbortWords | None,
    ) -> Launched | None:
        """Begin a decode step and return; None, with nothing begun, if this batch has to be computed at once.

        One more may be launched before this one is collected: `SequenceStep.follows` names rows of this one.
        """
        ...

    def samples_on_device(self, row: SampleRow) -> bool:
        """Return whether a step samples `row` where its logits are, so that another step may follow it."""
        ...


@runtime_checkable
class CompletionFdBackend(LaunchingBackend, Protocol):
    """A backend that signals when a launched step is done, so that no thread has to wait for it."""

    @property
    def completions(self) -> int:
        """File descriptor to which a byte comes whenever a launched step is done. It does not block."""
        ...


@runtime_checkable
class GraphBackend(LaunchingBackend, Protocol):
    """A backend that can launch only what it has recorded before."""

    def plan_decode(self, max_batch: int, block_size: int, *, windows: WindowGroups | None = None) -> int:
        """Allocate the buffers that decode steps of up to `max_batch` rows need beside weights and blocks,
        without the graphs themselves; return how many graphs there will be. `windows` as in `KVLayout`.
        """
        ...

    def prepare_decode(self, memory: KVMemory) -> None:
        """Record the graphs of decode steps over `memory`; `plan_decode` came before. May take seconds."""
        ...


@runtime_checkable
class PromptGraphBackend(Protocol):
    """A backend that can record short prompt steps."""

    def record_prompts(self, layout: KVLayout, most_tokens: int) -> int:
        """Record steps of up to `most_tokens` tokens over memories of `layout`, with all that they need
        beside weights and blocks; return how many there are. May take seconds.
        """
        ...
