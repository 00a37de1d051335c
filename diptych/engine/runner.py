"""Steps of one model: the batch is checked, then the backend computes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from diptych.engine.adapter_slots import AdapterSlots
from diptych.engine.adapters.adapter import Adapter
from diptych.engine.backend import (
    AdapterBackend,
    CompletionFdBackend,
    EmbeddingBackend,
    FeatureBackend,
    GraphBackend,
    HiddenRowsBackend,
    LaunchingBackend,
    MixedStepBackend,
    PromptGraphBackend,
    SamplingBackend,
    TreeBackend,
)
from diptych.engine.batch import AbortWords, BatchError, Launched, SequenceStep, StepOutput, check_batch
from diptych.engine.cpu_policy import CpuPolicy
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.kv.window_groups import WindowGroups
from diptych.engine.loaded_model import Model
from diptych.engine.sampling import SampleRow

_Result = TypeVar("_Result")


class Runner:
    """Runs steps of one model. One thread at a time calls it."""

    def __init__(self, model: Model, threads: int = 0, *, cpu: CpuPolicy | None = None) -> None:
        """Run `model` on the cores that `cpu` gives a step: by default `threads` of them, 0 for all usable.

        Raises ValueError for a negative number of threads.
        """
        self.model = model
        self.cpu = cpu or CpuPolicy(model.backend, threads)
        self.on_step: Callable[[float, int], None] | None = None
        """Called after every step, where its results are: seconds of the forward pass, tokens computed."""
        self.on_work: Callable[[Sequence[SequenceStep]], None] | None = None
        """Called with the batch of every step that begins."""
        backend = model.backend
        self.recorded_prompts = 0
        """Number of prompt steps that are recorded."""
        self._sampling = backend if isinstance(backend, SamplingBackend) else None
        self._launching = backend if isinstance(backend, LaunchingBackend) else None
        self._graphs = backend if isinstance(backend, GraphBackend) else None
        self.completions = backend.completions if isinstance(backend, CompletionFdBackend) else None
        """File descriptor with a byte for every launched step that is done; None: `collect` has to wait."""
        self._last_end = 0.0  # of the step before
        self._adapters: AdapterSlots | None = None

    @property
    def threads(self) -> int:
        """Cores of a step while no other worker lends any."""
        return self.cpu.threads

    def step(self, sequences: Sequence[SequenceStep], abort: AbortWords | None = None) -> torch.Tensor:
        """Compute a step and return float32 logits `[wanted rows, vocab]`, in order: a row for each sequence
        that wants logits, or as many as it asks for (`SequenceStep.trailing`).

        The batch mixes decode rows and prefill chunks freely. Sequences may share blocks that no sequence of
        the batch writes. Raises BatchError, before anything is written, for a batch that would leave its
        memory.
        """
        if not sequences:
            return torch.empty((0, self.model.shape.vocab_size))
        return self._compute(sequences, abort, lambda: self.model.backend.forward(sequences, abort))

    def step_and_sample(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[SampleRow | None],
        abort: AbortWords | None = None,
    ) -> StepOutput:
        """Compute a step as `step` does, and sample tokens where the logits are.

        `rows` has an entry for each row of logits; None asks for the logits. Backends that cannot sample give
        all logits. Raises BatchError as `step` does, ValueError for another number of rows.
        """
        backend = self._sampling
        if not sequences or backend is None:
            return StepOutput.logits_only(self.step(sequences, abort))
        if len(rows) != sum(step.logit_rows for step in sequences):
            raise ValueError("one entry a row of logits")
        return self._compute(sequences, abort, lambda: backend.forward_and_sample(sequences, rows, abort))

    @property
    def mixes_chunks(self) -> bool:
        """True if chunks of prompts are best computed in the steps of decode rows."""
        return isinstance(self.model.backend, MixedStepBackend)

    @property
    def launches(self) -> bool:
        """True if the backend can launch steps ahead."""
        return self._launching is not None

    def samples_on_device(self, row: SampleRow) -> bool:
        """Return whether a launched step samples `row`, so that another step may be launched to follow it."""
        return self._launching is not None and self._launching.samples_on_device(row)

    def launch(
        self,
        sequences: Sequence[SequenceStep],
        rows: Sequence[SampleRow | None],
        abort: AbortWords | None = None,
    ) -> Launched | None:
        """Begin a decode step and return; None if this batch has to go to `step_and_sample`.

        A second step may be launched before the first is collected, if every row of the first is sampled on
        the device: its sequences may follow rows of the first (`SequenceStep.follows`), whose tokens the host
        does not know yet. Raises BatchError as `step` does.
        """
        if self._launching is None:
            return None
        self._check(sequences, abort)
        tokens = sum(len(step.token_ids) for step in sequences)
        share = self.cpu.begin_step(tuned=tokens == 1)
        launched = self._launching.launch(sequences, rows, abort)
        if launched is not None and self.on_work is not None:
            self.on_work(sequences)
        return (
            None if launched is None else _TimedStep(launched, partial(self._launched_ended, tokens, share))
        )

    def plan_decode(self, max_batch: int, block_size: int, windows: WindowGroups | None = None) -> int:
        """Allocate the buffers of decode steps of up to `max_batch` rows; return how many graphs there will
        be, 0 on a backend without graphs. `windows` as in `KVLayout`.
        """
        return 0 if self._graphs is None else self._graphs.plan_decode(max_batch, block_size, windows=windows)

    def prepare_decode(self, memory: KVMemory) -> None:
        """Record the graphs of decode steps over `memory`, where the backend has graphs: takes seconds."""
        if self._graphs is not None:
            self._graphs.prepare_decode(memory)

    def record_prompts(self, layout: KVLayout, most_tokens: int) -> int:
        """Record prompt steps of up to `most_tokens` tokens over memories of `layout`, where the backend can;
        return how many there are. Takes seconds.
        """
        backend = self.model.backend
        if isinstance(backend, PromptGraphBackend):
            self.recorded_prompts = backend.record_prompts(layout, most_tokens)
        return self.recorded_prompts

    def allow_adapters(self, slots: int, max_rank: int) -> str | None:
        """Let steps have rows with adapters, as `AdapterBackend.allow_adapters` does; return what is lacking,
        in words, if the backend computes none.
        """
        backend = self.model.backend
        if not isinstance(backend, AdapterBackend):
            return f"adapters are not computed by the {self.model.backend_name} step"
        if (why := backend.allow_adapters(slots, max_rank)) is None:
            self._adapters = AdapterSlots(backend)
        return why

    def give_hidden_rows(self) -> str | None:
        """Let outputs of steps have hidden rows (`StepOutput.hidden`); return what is lacking, in words, if
        the backend gives none.
        """
        backend = self.model.backend
        if not isinstance(backend, HiddenRowsBackend):
            return f"the {self.model.backend_name} step gives no hidden rows"
        self._sampling = backend.give_hidden_rows()
        return None

    @property
    def embedding(self) -> torch.Tensor | None:
        """The model's embedding `[vocab, hidden]`; None where the backend does not have it whole."""
        backend = self.model.backend
        return backend.embedding if isinstance(backend, EmbeddingBackend) else None

    @property
    def has_features(self) -> bool:
        """True if steps of the model can give features."""
        return isinstance(self.model.backend, FeatureBackend)

    def give_features(self, layers: Sequence[int]) -> str | None:
        """Let outputs of steps have the residual stream before `layers` (`StepOutput.features`); return what
        is lacking, in words, if the backend gives none.
        """
        backend = self.model.backend
        if not isinstance(backend, FeatureBackend):
            return f"the {self.model.backend_name} step gives no features of layers"
        self._sampling = backend.give_features(layers)
        return None

    def lacks_trees(self) -> str | None:
        """Return None if steps may have trees of tokens (`SequenceStep.parents`), else why not, in words."""
        backend = self.model.backend
        if not isinstance(backend, TreeBackend):
            return f"the {self.model.backend_name} step computes no trees of tokens"
        return backend.lacks_trees()

    def prepare_adapter(self, adapter: Adapter) -> object:
        """Return an adapter as `place_adapter` takes it. Takes time; any thread may call it during steps."""
        return self._adapter_slots().prepare(adapter)

    def place_adapter(self, slot: int, prepared: object | None) -> None:
        """Put an adapter into a slot before the next step, or None to empty it.

        Any thread may call it while no step, launched ones included, reads the slot.
        """
        self._adapter_slots().place(slot, prepared)

    def _adapter_slots(self) -> AdapterSlots:
        if self._adapters is None:
            raise RuntimeError("adapters were not allowed")
        return self._adapters

    def _compute(
        self, sequences: Sequence[SequenceStep], abort: AbortWords | None, forward: Callable[[], _Result]
    ) -> _Result:
        """Check the batch, compute it by `forward` on the cores of a step, and report how long it took."""
        self._check(sequences, abort)
        if any(step.follows is not None for step in sequences):
            raise ValueError("a step that follows another one is launched")
        self.cpu.begin_step()
        if self.on_work is not None:
            self.on_work(sequences)
        started = time.perf_counter()
        result = forward()
        self._report(started, sum(len(s.token_ids) for s in sequences))
        return result

    def _check(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> None:
        slots = () if self._adapters is None else self._adapters.ready()
        check_batch(sequences, self.model.shape.vocab_size, slots)
        if any(step.parents is not None for step in sequences) and (why := self.lacks_trees()) is not None:
            raise BatchError(why)
        if abort is not None and len(abort.words) != len(sequences):
            raise ValueError("one abort word a sequence")

    def _launched_ended(self, tokens: int, share: float, started: float) -> None:
        seconds = self._report(started, tokens)
        if tokens == 1:
            self.cpu.end_step(share, seconds)

    def _report(self, started: float, tokens: int) -> float:
        """Report the end of a step; return its seconds from `started` or from the end of the one before."""
        now = time.perf_counter()
        started, self._last_end = max(started, self._last_end), now
        if self.on_step is not None:
            self.on_step(now - started, tokens)
        return now - started


class _TimedStep:
    """A launched step that reports when it was begun, once it is collected."""

    def __init__(self, launched: Launched, ended: Callable[[float], None]) -> None:
        self._launched = launched
        self._ended = ended
        self._started = time.perf_counter()

    def done(self) -> bool:
        """See `Launched.done`."""
        return self._launched.done()

    def collect(self) -> StepOutput:
        """See `Launched.collect`."""
        output = self._launched.collect()
        self._ended(self._started)
        return output
