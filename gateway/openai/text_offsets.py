"""Where each token begins in a text, for ``text_offset`` of OpenAI's completions.

A byte-level token may begin or end within a character, so that the characters of a text are not those of its
tokens one by one: their bytes have to be read as one text, as it is shown.
"""

from __future__ import annotations

import codecs
from typing import Final

_Utf8Decoder: Final = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """Counts characters while tokens come.

    Args:
        before: bytes of a character that is under way before the first token.
    """

    def __init__(self, before: bytes = b"") -> None:
        self._decoder = _Utf8Decoder("replace")
        self._characters = len(self._decoder.decode(before))

    def take(self, token: bytes) -> int:
        """Characters before this token; one that begins within a character begins where that does."""
        offset = self._characters
        self._characters += len(self._decoder.decode(token))
        return offset

    def copy(self) -> TextOffsets:
        """The same place, for a text that goes on in several ways."""
        same = TextOffsets()
        same._characters = self._characters
        same._decoder.setstate(self._decoder.getstate())
        return same
