"""Reasoning of an output: tokens in, the text of the reasoning and the tokens of the answer out.

Line breaks around the reasoning separate it from its marks and are in no text, unless the answer was asked to
match a grammar: then that is as it was written.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.output.detokenizer import Detokenizer
from gateway.reasoning.splitter import Part, ReasoningSplitter

_BREAKS = "\r\n"


class ReasoningText:
    """Reasoning of one output.

    Args:
        splitter: a fresh one.
        detokenizer: a fresh one, for the reasoning; None: its text is not wanted.
        exact: the answer matches a grammar, with the line breaks at its beginning.
    """

    def __init__(self, splitter: ReasoningSplitter, detokenizer: Detokenizer | None, *, exact: bool) -> None:
        self._splitter = splitter
        self._detokenizer = detokenizer
        self._trims_answer = not exact
        self._held = ""  # line breaks that may be the last ones
        self._begun = False  # some text came
        self._answered = False  # likewise of the answer
        self._text: list[str] = []

    @property
    def tokens(self) -> int:
        """Tokens of reasoning so far."""
        return self._splitter.reasoning_tokens

    @property
    def pending(self) -> bool:
        """True if there is text to take."""
        return bool(self._text)

    def push(self, token_ids: Sequence[int]) -> list[int]:
        """Add the next tokens of the output; return those of the answer."""
        return self._answer_of(self._splitter.push(token_ids))

    def finish(self) -> list[int]:
        """End the output; return tokens of the answer that were held back."""
        # What is left of a character is no text, and what is left of white space is a separator.
        return self._answer_of(self._splitter.finish())

    def take(self) -> str:
        """Return the text since the last call."""
        text, self._text = "".join(self._text), []
        return text

    def trimmed_answer(self, text: str) -> str:
        """Return a piece of the answer's text without the line breaks between the reasoning and it."""
        if self._answered or not self._trims_answer or not self.tokens:
            return text
        text = text.lstrip(_BREAKS)
        self._answered = bool(text)
        return text

    def _answer_of(self, segments: Sequence[tuple[Part, Sequence[int]]]) -> list[int]:
        answer: list[int] = []
        for part, token_ids in segments:
            if part is Part.CONTENT:
                answer += token_ids
            elif self._detokenizer is not None:
                self._add(self._detokenizer.push(token_ids))
        return answer

    def _add(self, text: str) -> None:
        text = self._held + text
        if not self._begun:
            text = text.lstrip(_BREAKS)
        shown = text.rstrip(_BREAKS)
        self._held = text[len(shown) :]
        self._begun |= bool(shown)
        if shown:
            self._text.append(shown)
