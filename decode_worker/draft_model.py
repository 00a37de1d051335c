"""A drafter that is a smaller model: its keys and values lie in a second segment of each sequence's blocks.

The segment is complete for a prompt when its handoff is (diptych/worker_process/draft_chunks.py). From there
on each draft computes what the sequence has got since, then token after token, for all sequences together. A
drafted token is drawn by the request's own seed, counter and rules, from the draft model's logits: where the
two models agree, so do the draws.
"""

from __future__ import annotations

from collections.abc import Sequence

from decode_worker.growing_draft import GrowingDraft, grow
from decode_worker.sequence import DecodeSequence
from diptych.engine.batch import SequenceStep, StepOutput, can_sample_on_device
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.runner import Runner
from diptych.engine.sampling import Sampled, SampleFailure, sample


class DraftModel:
    """A `Drafter`."""

    def __init__(self, runner: Runner, memory: KVMemory) -> None:
        """Draft with `runner`, which is the draft model's, over its segment of the blocks of `memory`.

        Raises ValueError for blocks without one.
        """
        if memory.draft is None:
            raise ValueError("the blocks have no segment for a draft model")
        self._runner = runner
        self._memory = memory.draft
        self._max_context = runner.model.shape.max_context

    def rests(self, sequence: DecodeSequence) -> bool:
        """See `Drafter.rests`: after a failure, and past the draft model's context, there are no drafts."""
        return sequence.draft_computed is None or sequence.num_tokens >= self._max_context

    def draft(self, sequences: Sequence[DecodeSequence], counts: Sequence[int]) -> Sequence[Sequence[int]]:
        """See `Drafter.draft`."""
        drafts = [_Draft(one, count) for one, count in zip(sequences, counts, strict=True)]
        going = [draft for draft in drafts if draft.count > 0 and not self.rests(draft.sequence)]
        grow(going, self._extend, self._max_context, "the draft model")
        return [draft.tokens for draft in drafts]

    def _extend(self, drafts: Sequence[_Draft]) -> None:
        """Compute the known tokens of all drafts, and draw one more for each."""
        steps = [draft.step(self._memory) for draft in drafts]
        rows = [draft.walk.row for draft in drafts]
        output = self._runner.step_and_sample(steps, [can_sample_on_device(row) for row in rows])
        for draft, sampled in zip(drafts, _sampled(output, drafts), strict=True):
            draft.take(sampled)


class _Draft(GrowingDraft):
    """A draft that the draft model computes."""

    def step(self, memory: KVMemory) -> SequenceStep:
        """Return the step over the tokens whose keys and values are not there yet."""
        sequence = self.sequence
        start = sequence.draft_computed or 0
        known = [*sequence.output_ids[start - sequence.prompt_tokens :], *self.tokens]
        new = known if not self.tokens else known[-1:]
        return SequenceStep(memory, sequence.block_ids, start, new, wants_logits=True)

    def take(self, sampled: Sampled | SampleFailure) -> None:
        """Take what was drawn after the tokens that were computed."""
        self.sequence.draft_computed = self.sequence.num_tokens + len(self.tokens)
        self.add(None if isinstance(sampled, SampleFailure) else sampled.token_id)


def _sampled(output: StepOutput, drafts: Sequence[_Draft]) -> list[Sampled | SampleFailure]:
    """Return each draft's token: drawn by the step, or here from its row of logits."""
    left = [draft for token, draft in zip(output.tokens, drafts, strict=True) if token is None]
    drawn = iter(sample(output.logits, [draft.walk.row for draft in left]))
    return [next(drawn) if token is None else token for token in output.tokens]
