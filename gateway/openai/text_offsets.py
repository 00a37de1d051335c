"""Where each token begins in a text, for ``text_offset`` of OpenAI's completions.

A byte-level token may begin or end within a character, so that the characters of a text are not those of its
tokens one by one: their bytes have to be read as one text, as it is shown.
"""

from __future__ import annotations

import codecs
from typing import Final

from gateway.output.detokenizer import REPLACEMENT

_Utf8Decoder: Final = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """Counts characters while tokens come.

    Args:
        before: bytes of a character that is under way before the first token. It counts if it is completed
            (see `gateway.output.detokenizer`).
    """

    def __init__(self, before: bytes = b"") -> None:
        self._decoder = _Utf8Decoder("replace")
        self._decoder.decode(before)
        self._uncounted = REPLACEMENT if before else ""  # if the text begins with it
        self._characters = 0

    def take(self, token: bytes) -> int:
        """Characters before this token; one that begins within a character begins where that does."""
        offset = self._characters
        text = self._decoder.decode(token)
        if text:
            text, self._uncounted = text.removeprefix(self._uncounted), ""
        self._characters += len(text)
        return offset

    def copy(self) -> TextOffsets:
        """The same place, for a text that goes on in several ways."""
        same = TextOffsets()
        same._characters, same._uncounted = self._characters, self._uncounted
        same._decoder.setstate(self._decoder.getstate())
        return same
