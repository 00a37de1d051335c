"""A drafter that is a head over features (EAGLE, MTP): it goes on from those of the tokens that are there.

Its keys and values of a prompt come with the handoff (diptych/worker_process/eagle_chunks.py). From there on
each draft computes what the sequence has got since, with the features that the steps gave, and then token
after token with the head's own. What it computes of drafted tokens is computed again once the model's
features of them are there. The first step after a prompt has no drafts: the feature of the prompt's last
token stays with its worker, and is zero here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decode_worker.growing_draft import GrowingDraft, grow
from decode_worker.sequence import DecodeSequence
from diptych.engine.heads.feature_head import FeatureHead, HeadStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.sampling import Sampled, sample


class EagleDraft:
    """A `Drafter`."""

    def __init__(self, head: FeatureHead, memory: KVMemory) -> None:
        """Draft with `head` over its segment of the blocks of `memory`.

        Raises ValueError for blocks without one.
        """
        if memory.draft is None:
            raise ValueError("the blocks have no segment for a head")
        self._head = head
        self.memory = memory.draft

    def rests(self, sequence: DecodeSequence) -> bool:
        """See `Drafter.rests`: after a failure, and past the head's context, there are no drafts."""
        return sequence.draft_computed is None or sequence.num_tokens >= self._head.shape.max_context

    def draft(self, sequences: Sequence[DecodeSequence], counts: Sequence[int]) -> Sequence[Sequence[int]]:
        """See `Drafter.draft`."""
        drafts = [_Draft(one, count) for one, count in zip(sequences, counts, strict=True)]
        going = [
            one for one in drafts if one.count > 0 and one.sequence.features and not self.rests(one.sequence)
        ]
        grow(going, self._extend, self._head.shape.max_context, "the drafting head")
        return [one.tokens for one in drafts]

    def _extend(self, drafts: Sequence[_Draft]) -> None:
        """Compute the known tokens of all drafts, and draw one more for each."""
        steps = [one.step(self._head) for one in drafts]
        features = self._head.step(self.memory, steps)
        ends = torch.tensor([len(step.token_ids) for step in steps]).cumsum(0) - 1
        logits = self._head.logits(features[ends])
        drawn = sample(logits, [one.walk.row for one in drafts])
        for one, feature, sampled in zip(drafts, features[ends], drawn, strict=True):
            one.take(feature, sampled if isinstance(sampled, Sampled) else None)


class _Draft(GrowingDraft):
    """A draft that the head computes."""

    _feature: torch.Tensor | None = None

    def step(self, head: FeatureHead) -> HeadStep:
        """Return the step over the tokens whose keys and values are not there yet."""
        if self._feature is None:
            return catch_up(self.sequence, head)
        at = self.sequence.num_tokens + len(self.tokens) - 1
        return HeadStep(self.sequence.block_ids, at, self.tokens[-1:], self._feature[None])

    def take(self, feature: torch.Tensor, sampled: Sampled | None) -> None:
        """Take what was drawn, and the feature of the token that it follows."""
        if self._feature is None:
            self.sequence.draft_computed = self.sequence.num_tokens
            self.sequence.features.clear()
        self._feature = feature
        self.add(None if sampled is None else sampled.token_id)


def catch_up(sequence: DecodeSequence, head: FeatureHead) -> HeadStep:
    """Return the step over the tokens of a sequence that were not computed with the model's features."""
    start = sequence.draft_computed or 0
    new = sequence.output_ids[start - sequence.prompt_tokens :]
    known = torch.stack(sequence.features[-len(new) :])
    missing = torch.zeros(len(new) - len(known), known.shape[1])
    return HeadStep(sequence.block_ids, start, new, head.fuse(torch.cat([missing, known])))
