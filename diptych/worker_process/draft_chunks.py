"""The draft model's keys and values of prompts, computed chunk by chunk behind the model's own.

They lie in the second segment of the same blocks, and so go with every handoff and stay with every cached
prefix. They serve drafts alone: where they cannot be computed, drafts are worse and nothing else is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.runner import Runner

_log = logging.getLogger(__name__)


class DraftChunks:
    """Runs the draft model over the chunks of a step that the model has computed."""

    def __init__(self, runner: Runner) -> None:
        """Compute with `runner`, which is the draft model's."""
        self._runner = runner

    def compute(self, sequences: Sequence[SequenceStep], abort: AbortWords | None = None) -> None:
        """Compute the tokens of `sequences` into the draft segments of their blocks; only log a failure.

        Called on the engine's thread.
        """
        limit = self._runner.model.shape.max_context
        try:
            if steps := [draft_step(step) for step in sequences if step.start + len(step.token_ids) <= limit]:
                self._runner.step(steps, abort if len(steps) == len(sequences) else None)
        except Exception:
            _log.exception("the draft model did not compute %d chunks", len(sequences))


def draft_step(step: SequenceStep) -> SequenceStep:
    """Return the draft model's step over the same tokens, without logits. Raises ValueError without one."""
    if step.memory.draft is None:
        raise ValueError("the blocks have no segment for a draft model")
    return replace(step, memory=step.memory.draft, wants_logits=False, trailing=1, follows=None, adapter=None)
