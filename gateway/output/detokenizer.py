"""Token ids to text while they are still coming, never half a character.

A byte-level token is any run of bytes: one emoji is often three tokens. The decoder keeps the bytes of an
unfinished character back and gives U+FFFD only once no further byte could complete it. Whatever the cuts
between pushes, the pushed texts and the flush add up to `Tokenizer.decode` of all the ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final

from runtime.tokenizer.tokenizer import Tokenizer

_Utf8Decoder: Final = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One output's text. Not thread-safe; one per request."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, shown: frozenset[int] = frozenset()) -> None:
        """``shown``: control tokens whose text is not left out even so."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown = shown
        self._decoder = _Utf8Decoder("replace")
        self._at_start = tokenizer.strips_first_space

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that ``token_ids`` complete; possibly empty."""
        tokenizer = self._tokenizer
        if self._skip_special:
            shown = self._shown
            token_ids = [one for one in token_ids if not tokenizer.is_special(one) or one in shown]
        return self._strip(self._decoder.decode(b"".join(map(tokenizer.piece, token_ids))))

    def flush(self) -> str:
        """The end of the output: bytes that stayed incomplete are U+FFFD. The detokenizer starts anew."""
        text = self._strip(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        self._at_start = self._tokenizer.strips_first_space
        return text

    def _strip(self, text: str) -> str:
        if not (self._at_start and text):
            return text
        self._at_start = False
        return text[1:] if text.startswith(" ") else text
