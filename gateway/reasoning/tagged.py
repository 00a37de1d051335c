"""Reasoning between two tokens, such as ``<think>…</think>``: Qwen3, DeepSeek, GLM, SmolLM3, Mistral.

The chat template may have opened the span in the prompt, or opened and closed it to have none. Else the
output may begin with the opening token, with white space before it at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.runtime.grammar.reasoning_span import EndMark, ReasoningSpan
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from gateway.reasoning.splitter import Part, Segment, Start


@dataclass(frozen=True, slots=True)
class TaggedReasoning:
    """Format of a model whose tokens ``open_id`` and ``close_id`` are spelled ``opened`` and ``closed``."""

    name: str
    opened: str
    closed: str
    open_id: int
    close_id: int
    tokenizer: Tokenizer

    def start(self, prompt: str) -> Start:
        end = prompt.rstrip()
        if end.endswith(self.opened):
            return Start.OPEN
        return Start.CLOSED if end.endswith(self.closed) else Start.BEFORE

    def splitter(self, start: Start, *, constrained: bool) -> TaggedSplitter:
        return TaggedSplitter(self, start, constrained=constrained)

    def span(self, start: Start, *, forced: bool) -> ReasoningSpan:
        ends = (EndMark((self.close_id,)),)
        return ReasoningSpan(start is Start.OPEN, (self.open_id,), ends, self.leads)

    @property
    def leads(self) -> tuple[int, ...]:
        """The line break, where it is one token."""
        ids = self.tokenizer.encode("\n")
        return tuple(ids) if len(ids) == 1 else ()


class TaggedSplitter:
    """Splitter of one output.

    Args:
        constrained: the span is opened as for the worker that applies the grammar: by the first token, or
            after one that leads to it.
    """

    def __init__(self, form: TaggedReasoning, start: Start, *, constrained: bool) -> None:
        self.reasoning_tokens = 0
        self._form = form
        self._leads = form.leads if constrained else None  # None: any white space
        self._start = start  # where the next token is: within the span, before it or after it
        self._blank: list[int] = []  # white space before a span that may follow

    def push(self, token_ids: Sequence[int]) -> list[Segment]:
        found: list[Segment] = []
        rest = token_ids
        while rest:
            if self._start is Start.CLOSED:
                return [*found, Segment(Part.CONTENT, rest)]
            rest = self._before(rest, found) if self._start is Start.BEFORE else self._inside(rest, found)
        return found

    def finish(self) -> list[Segment]:
        blank, self._blank = self._blank, []
        return [Segment(Part.CONTENT, blank)] if blank and self._leads is None else []

    def _before(self, token_ids: Sequence[int], found: list[Segment]) -> Sequence[int]:
        """Look at the first token; return those that are left."""
        first, rest = token_ids[0], token_ids[1:]
        if first == self._form.open_id:
            self.reasoning_tokens += len(self._blank) + 1
            self._blank, self._start = [], Start.OPEN
        elif self._may_lead(first):
            self._blank.append(first)
        else:
            # The worker lets nothing but the span follow a token that leads to it.
            blank = self._blank if self._leads is None else []
            found.append(Segment(Part.CONTENT, [*blank, first]))
            self._blank, self._start = [], Start.CLOSED
        return rest

    def _inside(self, token_ids: Sequence[int], found: list[Segment]) -> Sequence[int]:
        """Look for the end of the span; return the tokens after it."""
        close = self._form.close_id
        end = next((index for index, one in enumerate(token_ids) if one == close), None)
        thoughts = token_ids if end is None else token_ids[:end]
        if thoughts:
            found.append(Segment(Part.REASONING, thoughts))
        self.reasoning_tokens += len(thoughts)
        if end is None:
            return ()
        self.reasoning_tokens += 1
        self._start = Start.CLOSED
        return token_ids[end + 1 :]

    def _may_lead(self, token_id: int) -> bool:
        if self._leads is not None:
            return token_id in self._leads and not self._blank
        piece = self._form.tokenizer.piece(token_id)
        return bool(piece) and not piece.strip()
