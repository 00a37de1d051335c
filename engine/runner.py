"""One step of one model: the batch is checked, then the backend computes it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

import torch

from engine.batch import AbortWords, SequenceStep, check_batch
from engine.core_share import CoreShare
from engine.model import Model


class Runner:
    """Steps of one model on its own cores and on those lent to it. One thread at a time calls it."""

    def __init__(self, model: Model, threads: int, share: CoreShare | None = None) -> None:
        """`threads` cores a step; 0 is all that this process may use. With a `share`, as many as it gives."""
        if threads < 0:
            raise ValueError("a negative number of threads")
        self.model = model
        self.threads = threads or len(os.sched_getaffinity(0))
        self.on_step: Callable[[float, int], None] | None = None
        """Hears of every step, on its thread: seconds of the forward pass, and tokens computed."""
        self._share = share
        self._set: tuple[int, int] | None = None  # (calling thread, threads) that the backend was told

    def step(self, sequences: Sequence[SequenceStep], abort: AbortWords | None = None) -> torch.Tensor:
        """Compute a step and return float32 logits `[wanted rows, vocab]`, in order: a row for each sequence
        that wants logits, or as many as it asks for (`SequenceStep.trailing`).

        The batch mixes decode rows and prefill chunks freely. Sequences may share blocks that no sequence of
        the batch writes. Raises BatchError, before anything is written, for a batch that would leave its
        memory.
        """
        shape = self.model.shape
        if not sequences:
            return torch.empty((0, shape.vocab_size))
        check_batch(sequences, shape.vocab_size)
        if abort is not None and len(abort.words) != len(sequences):
            raise ValueError("one abort word a sequence")
        self._use(self.threads if self._share is None else self._share.begin_step())
        started = time.perf_counter()
        try:
            logits = self.model.backend.forward(sequences, abort)
        finally:
            if self._share is not None:
                self._share.end_step()
        if self.on_step is not None:
            self.on_step(time.perf_counter() - started, sum(len(s.token_ids) for s in sequences))
        return logits

    def rest(self) -> None:
        """There is no step to make for now: others may use the cores."""
        if self._share is not None:
            self._share.rest()

    def _use(self, threads: int) -> None:
        # OpenMP keeps the number of threads per calling thread.
        wanted = threading.get_ident(), threads
        if self._set != wanted:
            self._set = wanted
            self.model.backend.set_threads(threads)
