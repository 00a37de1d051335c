"""One step of one model: the batch is checked, then the backend computes it."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch

from engine.batch import AbortWords, SequenceStep, check_batch
from engine.model import Model


class Runner:
    """Steps of one model on a fixed number of cores. Called from one thread at a time."""

    def __init__(self, model: Model, threads: int) -> None:
        """`threads` cores a step; 0 is all that this process may use."""
        if threads < 0:
            raise ValueError("a negative number of threads")
        self.model = model
        self.threads = threads or len(os.sched_getaffinity(0))
        self._thread: int | None = None

    def step(self, sequences: Sequence[SequenceStep], abort: AbortWords | None = None) -> torch.Tensor:
        """Compute a step and return float32 logits `[sequences that want them, vocab]`, in order.

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
        # OpenMP keeps the number of threads per calling thread.
        if self._thread != threading.get_ident():
            self._thread = threading.get_ident()
            self.model.backend.set_threads(self.threads)
        return self.model.backend.forward(sequences, abort)
