"""The text of bytes that come in pieces, each of which may begin or end within a character."""

from __future__ import annotations

import codecs
from typing import Final

REPLACEMENT: Final = "\ufffd"
_Utf8Decoder: Final = codecs.getincrementaldecoder("utf-8")


class Utf8Text:
    """Keeps the bytes of an unfinished character back until no further byte can complete it.

    Args:
        before: bytes of a character that is under way before the first piece.
        left_out: what the text does not show if it begins with it.
    """

    def __init__(self, before: bytes = b"", left_out: str = "") -> None:
        self._decoder = _Utf8Decoder("replace")
        self._decoder.decode(before)
        self._left_out = left_out

    @property
    def unfinished(self) -> bytes:
        """What there is of the character that the bytes so far end within."""
        return self._decoder.getstate()[0]

    def push(self, data: bytes, *, final: bool = False) -> str:
        """The text that ``data`` completes; of the ``final`` piece what stays incomplete is U+FFFD."""
        text = self._decoder.decode(data, final)
        if not (self._left_out and text):
            return text
        text, self._left_out = text.removeprefix(self._left_out), ""
        return text

    def copy(self) -> Utf8Text:
        """The same place, for a text that goes on in several ways."""
        same = Utf8Text(left_out=self._left_out)
        same._decoder.setstate(self._decoder.getstate())
        return same
