"""The draft model's keys and values of prompts, computed chunk by chunk behind the model's own.

They lie in the second segment of the same blocks, and so go with every handoff and stay with every cached
prefix. They serve drafts alone: where they cannot be computed, drafts are worse and nothing else is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from diptych.engine.batch import AbortWords, SequenceStep, StepOutput
from diptych.engine.runner import Runner

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftChunk:
    """A chunk of a prompt that the model has computed."""

    owner: object
    """The prompt."""
    step: SequenceStep
    features: torch.Tensor | None = None
    """`[tokens, features]`: those that the step gave (`StepOutput.features`)."""


def draft_chunks(
    owners: Sequence[object], sequences: Sequence[SequenceStep], output: StepOutput
) -> list[DraftChunk]:
    """Return the chunks of a step, each with its owner and its features."""
    if output.features is None:
        return [DraftChunk(owner, step) for owner, step in zip(owners, sequences, strict=True)]
    parts = output.features.split([len(step.token_ids) for step in sequences])
    return [DraftChunk(*one) for one in zip(owners, sequences, parts, strict=True)]


class PromptDrafts(Protocol):
    """A part that computes what drafts read of prompts."""

    def compute(self, chunks: Sequence[DraftChunk], abort: AbortWords | None = None) -> None:
        """Compute `chunks` into the draft segments of their blocks, if they have some; only log a failure.

        `abort` has a word for each of them. Called on the engine's thread.
        """
        ...


class DraftChunks:
    """Runs the draft model over the chunks of a step that the model has computed."""

    def __init__(self, runner: Runner) -> None:
        """Compute with `runner`, which is the draft model's."""
        self._runner = runner

    def compute(self, chunks: Sequence[DraftChunk], abort: AbortWords | None = None) -> None:
        """See `PromptDrafts.compute`."""
        limit = self._runner.model.shape.max_context
        try:
            steps = [
                draft_step(chunk.step)
                for chunk in chunks
                if chunk.step.memory.draft is not None
                and chunk.step.start + len(chunk.step.token_ids) <= limit
            ]
            if steps:
                self._runner.step(steps, abort if len(steps) == len(chunks) else None)
        except Exception:
            _log.exception("the draft model did not compute %d chunks", len(chunks))


def draft_step(step: SequenceStep) -> SequenceStep:
    """Return the draft model's step over the same tokens, without logits. Raises ValueError without one."""
    if step.memory.draft is None:
        raise ValueError("the blocks have no segment for a draft model")
    return replace(
        step,
        memory=step.memory.draft,
        wants_logits=False,
        trailing=1,
        follows=None,
        adapter=None,
        window_tables=(),  # pages of the model's states: the draft model has none
        window_first=0,
        settled=None,
    )
