"""One row of a step: tokens, and where their keys and values are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from diptych.engine.sampling import SampleRow
from diptych.worker_process.grammar_masks import GrammarState


@dataclass(slots=True, eq=False, weakref_slot=True)
class DecodeSequence:
    """A prompt with the output that this row has so far. The KV of the last token is not computed yet."""

    prompt_tokens: int
    output_ids: list[int]
    next_row: SampleRow
    """What the next token is sampled with; it sees `output_ids` grow."""
    grammar: GrammarState | None = None
    """After the output so far; the mask of `next_row`."""
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    """Of the first blocks, which are in the prefix cache."""
    draft: list[int] = field(default_factory=list)
    """What is expected after `output_ids`, and computed by the step that is laid out (speculation.py)."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.prompt_tokens + len(self.output_ids)

    @property
    def logit_rows(self) -> int:
        """Rows of logits that it has in a step."""
        return 1 + len(self.draft)

    def sample_rows(self) -> Sequence[SampleRow]:
        """What each of them is sampled with."""
        if not self.draft:
            return (self.next_row,)
        output, row = list(self.output_ids), self.next_row
        later = (replace(row, output_ids=output + self.draft[:count]) for count in range(1, self.logit_rows))
        return (row, *later)
