"""Reasoning of gpt-oss, whose output is messages in channels (OpenAI's Harmony format).

``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>``. What is
written in the channel ``analysis`` is reasoning; ``final``, and ``commentary`` without a recipient, are the
answer. A message to a tool (``commentary to=functions.name``) stays whole, header and all, for the parser of
tool calls. See https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from diptych.runtime.grammar.reasoning_span import EndMark, ReasoningSpan
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from gateway.reasoning.splitter import Part, Segment, Start

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
MARKS: Final = (START, CHANNEL, MESSAGE, END)

_ANALYSIS: Final = re.compile(r"<\|channel\|>\s*analysis\b")
_RECIPIENT: Final = re.compile(r"\bto=functions\.")
_CONTENT: Final = "final"
_LONGEST_ROLE: Final = 24  # tokens between the prompt's end and the first mark


@dataclass(frozen=True, slots=True)
class HarmonyReasoning:
    """Format of a model with the control tokens ``marks``, in the order of `MARKS`."""

    marks: tuple[int, ...]
    tokenizer: Tokenizer
    name: str = "harmony"

    def start(self, prompt: str) -> Start:
        # The model opens a channel itself; a prompt that ends within a message's text is not the template's.
        return Start.OPEN

    def splitter(self, start: Start, *, constrained: bool) -> HarmonySplitter:
        return HarmonySplitter(self)

    def span(self, start: Start, *, forced: bool) -> ReasoningSpan:
        _, channel, message, end = self.marks
        if forced:  # the grammar is of the messages after the reasoning
            return ReasoningSpan(True, (), (EndMark((end,)),))
        final = (channel, *self.tokenizer.encode(_CONTENT))
        return ReasoningSpan(True, (), (EndMark(final, until=message),))


class HarmonySplitter:
    """Splitter of one output."""

    def __init__(self, form: HarmonyReasoning) -> None:
        self.reasoning_tokens = 0
        self._form = form
        self._start, self._channel, self._message, self._end = form.marks
        # Tokens of a header that is not complete. The prompt has begun the first with <|start|>assistant.
        self._header: list[int] | None = [self._start]
        self._first = True  # no mark came so far
        self._part = Part.CONTENT
        self._whole = False  # the current message keeps its marks

    def push(self, token_ids: Sequence[int]) -> list[Segment]:
        found: list[Segment] = []
        text: list[int] = []
        for token_id in token_ids:
            if self._header is not None:
                self._header.append(token_id)
                self._first &= token_id not in self._form.marks
                if token_id == self._message:
                    self._read_header(found)
                elif self._first and len(self._header) > _LONGEST_ROLE:
                    found += self.finish()
            elif token_id in (self._start, self._channel):
                self._add(text, found)
                text = []
                self._header = [token_id]
            elif token_id == self._end:
                self._add([*text, token_id] if self._whole else text, found)
                text = []
                self.reasoning_tokens += self._part is Part.REASONING
                self._part, self._whole = Part.CONTENT, False
            else:
                text.append(token_id)
        self._add(text, found)
        return found

    def finish(self) -> list[Segment]:
        header, self._header = self._header or [], None
        # An output without any mark is text; a header that is not complete is none.
        return [Segment(Part.CONTENT, header[1:])] if self._first and header[1:] else []

    def _add(self, token_ids: list[int], found: list[Segment]) -> None:
        if not token_ids:
            return
        if self._part is Part.REASONING:
            self.reasoning_tokens += len(token_ids)
        found.append(Segment(self._part, token_ids))

    def _read_header(self, found: list[Segment]) -> None:
        """Begin the message of a complete header."""
        header, self._header = self._header or [], None
        text = b"".join(map(self._form.tokenizer.piece, header)).decode(errors="replace")
        self._whole = _RECIPIENT.search(text) is not None
        reasons = not self._whole and _ANALYSIS.search(text) is not None
        self._part = Part.REASONING if reasons else Part.CONTENT
        if reasons:
            self.reasoning_tokens += len(header)
        if self._whole:
            found.append(Segment(Part.CONTENT, header))
