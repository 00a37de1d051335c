"""One row of a step: tokens, and where their keys and values are."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.sampling import SampleRow
from worker.grammar import GrammarState


@dataclass(slots=True, eq=False)
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

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.prompt_tokens + len(self.output_ids)
