"""Where each token begins in a text, for ``text_offset`` of OpenAI's completions.

A byte-level token may begin or end within a character, so that the characters of a text are not those of its
tokens one by one: their bytes have to be read as one text, as it is shown.
"""

from __future__ import annotations

from gateway.output.utf8_text import REPLACEMENT, Utf8Text


class TextOffsets:
    """Counts characters while tokens come.

    Args:
        before: bytes of a character that is under way before the first token. It counts if it is completed
            (see `gateway.output.detokenizer`).
    """

    def __init__(self, before: bytes = b"") -> None:
        self._text = Utf8Text(before, REPLACEMENT if before else "")
        self._characters = 0

    def take(self, token: bytes) -> int:
        """Characters before this token; one that begins within a character begins where that does."""
        offset = self._characters
        self._characters += len(self._text.push(token))
        return offset

    def copy(self) -> TextOffsets:
        """The same place, for a text that goes on in several ways."""
        same = TextOffsets()
        same._text, same._characters = self._text.copy(), self._characters
        return same
