"""The interface of logits processors, which change one row of logits by what came before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float32]
"""Row of logits, or of log-probabilities: `[vocab]`."""


class History(Protocol):
    """The tokens before the one that is sampled."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def output_ids(self) -> Sequence[int]: ...


class LogitsProcessor(Protocol):
    """Change of logits that one request asked for, in the form that is quickest to apply."""

    def apply(self, scores: Scores, history: History) -> None:
        """Change `scores` in place; minus infinity forbids a token."""
