"""Offsets of tokens in a text, for ``text_offset`` of OpenAI's completions.

A byte-level token may begin or end within a character, so that the characters of a text are not those of its
tokens one by one: their bytes have to be read as one text, as it is shown. Tokens that it does not show take
none of it.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.output.utf8_text import Utf8Text


class TextOffsets:
    """Count of characters while tokens come.

    Args:
        text: where it begins (see `gateway.output.detokenizer.text_after`).
        hidden: whether the text does not show a token; None = it shows all.
    """

    def __init__(self, text: Utf8Text | None = None, hidden: Callable[[int], bool] | None = None) -> None:
        self._text = text or Utf8Text()
        self._hidden = hidden
        self._characters = 0

    def take(self, token_id: int, data: bytes) -> int:
        """Count characters before this token; one that begins within a character begins where that does."""
        offset = self._characters
        if self._hidden is None or not self._hidden(token_id):
            self._characters += len(self._text.push(data))
        return offset

    def go_on(self, text: Utf8Text, hidden: Callable[[int], bool] | None = None) -> None:
        """Begin an output behind its prompt. Arguments as at the beginning."""
        self._text, self._hidden = text, hidden

    def copy(self) -> TextOffsets:
        """Return a copy, for a text that goes on in several ways."""
        same = TextOffsets(self._text.copy(), self._hidden)
        same._characters = self._characters
        return same
