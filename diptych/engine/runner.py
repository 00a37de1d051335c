"""One step of one model: the batch is checked, then the backend computes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from diptych.engine.backend import (
    CompletionFdBackend,
    CoreLendingBackend,
    GraphBackend,
    LaunchingBackend,
    SamplingBackend,
)
from diptych.engine.batch import AbortWords, SequenceStep, check_batch
from diptych.engine.core_lending_tuner import CoreLendingTuner
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import Model
from diptych.engine.sampling import SampleRow
from diptych.engine.shared_cores import SharedCores
from diptych.engine.step_output import Launched, StepOutput
from diptych.engine.usable_cores import usable_cores

_Result = TypeVar("_Result")


class Runner:
    """Steps of one model on its own cores and on those lent to it. One thread at a time calls it."""

    def __init__(self, model: Model, threads: int, share: SharedCores | None = None) -> None:
        """`threads` cores a step; 0 is all that this process may use. With a `share`, as many as it gives."""
        if threads < 0:
            raise ValueError("a negative number of threads")
        self.model = model
        self.threads = threads or usable_cores()
        self.on_step: Callable[[float, int], None] | None = None
        """Hears of every step, where its results are: seconds of the forward pass, and tokens computed."""
        self._drawing = model.backend if isinstance(model.backend, SamplingBackend) else None
        self._launching = model.backend if isinstance(model.backend, LaunchingBackend) else None
        self.completions = (
            model.backend.completions if isinstance(model.backend, CompletionFdBackend) else None
        )
        """Of a file to which a byte comes when a launched step is over; None: `collect` has to wait."""
        self._recording = model.backend if isinstance(model.backend, GraphBackend) else None
        # Whether launched steps are computed on cores of this machine, and not on a device.
        self._launches_on_cores = isinstance(self._launching, CoreLendingBackend)
        self._share = share
        self._assisted: CoreLendingBackend | None = None
        if share is not None and isinstance(model.backend, CoreLendingBackend):
            model.backend.assist(share.address, share.others)
            self._assisted = model.backend
        self._help_worth = CoreLendingTuner()
        self._last_end = 0.0  # of the step before
        self._set: tuple[int, int] | None = None  # (calling thread, threads) that the backend was told

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

    def step_and_draw(
        self,
        sequences: Sequence[SequenceStep],
        draws: Sequence[SampleRow | None],
        abort: AbortWords | None = None,
    ) -> StepOutput:
        """As `step`, where the rows of logits that `draws` has something for may come back as tokens.

        One draw a row of logits; None asks for the logits. Backends that draw nothing give all logits.
        """
        backend = self._drawing
        if not sequences or backend is None:
            return StepOutput.nothing(self.step(sequences, abort))
        if len(draws) != sum(step.logit_rows for step in sequences):
            raise ValueError("one draw a row of logits")
        return self._compute(sequences, abort, lambda: backend.forward_and_draw(sequences, draws, abort))

    @property
    def launches(self) -> bool:
        """Whether steps can be launched ahead at all."""
        return self._launching is not None

    def samples_on_device(self, row: SampleRow) -> bool:
        """Whether a launched step draws this row, so that another one may be launched to follow it."""
        return self._launching is not None and self._launching.samples_on_device(row)

    def spare_core(self) -> bool:
        """Whether a core is left to those who pass tokens on while steps follow one another. Without one they
        take their time from a step, of ours or of others; between steps it costs nobody more than us.
        """
        if not self._launches_on_cores:
            return True
        return self._share is not None and self._share.spare()

    def launch(
        self,
        sequences: Sequence[SequenceStep],
        draws: Sequence[SampleRow | None],
        abort: AbortWords | None = None,
    ) -> Launched | None:
        """Begin a decode step and return; None if this batch has to go to `step_and_draw`.

        A second step may be launched before the first is collected, if every row of the first was to be
        drawn: its sequences may follow rows of the first (`SequenceStep.follows`), whose tokens the host
        does not know yet. Raises BatchError as `step` does.
        """
        if self._launching is None:
            return None
        self._check(sequences, abort)
        self.own()
        self._use(self._cores())
        tokens = sum(len(step.token_ids) for step in sequences)
        alone = 0.0 if tokens > 1 else self._help_worth.wanted()
        if self._assisted is not None:
            self._assisted.welcome(alone)
        launched = self._launching.launch(sequences, draws, abort)
        return None if launched is None else _Timed(launched, partial(self._ended, tokens, alone))

    def plan_decode(self, max_batch: int, block_size: int) -> int:
        """Take the memory of decode steps of up to `max_batch` rows; how many will be recorded, on a backend
        that records them.
        """
        return 0 if self._recording is None else self._recording.plan_decode(max_batch, block_size)

    def prepare_decode(self, memory: KVMemory) -> None:
        """Make decode steps over `memory` ready. It takes seconds where they are recorded."""
        if self._recording is not None:
            self._recording.prepare_decode(memory)

    def rest(self) -> None:
        """There is no step to make for now: others may use the cores."""
        if self._share is not None:
            self._share.rest()

    def own(self) -> None:
        """A step is about to be made. Said early, by the thread that passes messages: the one that computes
        may have to wait for the core itself.
        """
        if self._share is not None:
            self._share.own()

    def set_backlog(self, waited_s: float | None) -> None:
        """Tell the others of this machine for how long work has waited that a step does not take, if any."""
        if self._share is not None:
            self._share.set_backlog(waited_s)

    def others_waited_s(self) -> float | None:
        """For how long work of another worker of this machine has waited; None: its cores do for all."""
        return None if self._share is None else self._share.others_waited_s()

    def _compute(
        self, sequences: Sequence[SequenceStep], abort: AbortWords | None, forward: Callable[[], _Result]
    ) -> _Result:
        """Check the batch, then `forward` it on the cores that there are, and tell how long it took."""
        self._check(sequences, abort)
        if any(step.follows is not None for step in sequences):
            raise ValueError("a step that follows another one is launched")
        self.own()
        self._use(self._cores())
        if self._assisted is not None:
            self._assisted.welcome(0.0)
        started = time.perf_counter()
        result = forward()
        self._tell(started, sum(len(s.token_ids) for s in sequences))
        return result

    def _check(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> None:
        check_batch(sequences, self.model.shape.vocab_size)
        if abort is not None and len(abort.words) != len(sequences):
            raise ValueError("one abort word a sequence")

    def _ended(self, tokens: int, alone: float, started: float) -> None:
        """A launched step is over."""
        seconds = self._tell(started, tokens)
        if tokens == 1:
            self._help_worth.lasted(alone, seconds)

    def _tell(self, started: float, tokens: int) -> float:
        """A step of so many tokens is over: it began then, or when the one before it was over."""
        now = time.perf_counter()
        started, self._last_end = max(started, self._last_end), now
        if self.on_step is not None:
            self.on_step(now - started, tokens)
        return now - started

    def _cores(self) -> int:
        """How many a step is to begin with."""
        if self._share is None:
            return self.threads
        return self._share.home + (0 if self._assisted else self._share.free())

    def _use(self, threads: int) -> None:
        # OpenMP keeps the number of threads per calling thread.
        wanted = threading.get_ident(), threads
        if self._set != wanted:
            self._set = wanted
            self.model.backend.set_threads(threads)


class _Timed:
    """A launched step that tells when it was begun, once it is over."""

    def __init__(self, launched: Launched, ended: Callable[[float], None]) -> None:
        self._launched = launched
        self._ended = ended
        self._started = time.perf_counter()

    def over(self) -> bool:
        """See `Launched.over`."""
        return self._launched.over()

    def collect(self) -> StepOutput:
        """See `Launched.collect`."""
        drawn = self._launched.collect()
        self._ended(self._started)
        return drawn
