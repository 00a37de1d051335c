"""Token ids to text while they are still coming, never half a character.

A byte-level token is any run of bytes: one emoji is often three tokens. The decoder keeps the bytes of an
unfinished character back and gives U+FFFD only once no further byte could complete it. Whatever the cuts
between pushes, the pushed texts and the flush add up to `Tokenizer.decode` of all the ids.

A prompt of token ids may end within a character, too. The output's text begins with that character if the
output completes it. If it does not, what there is of it is no part of the output, whose text may have to be
JSON, say. Where the prompt is shown in front of the output its text ends before that character, and an output
that does not complete it begins with U+FFFD: both together are the text of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gateway.output.utf8_text import REPLACEMENT, Utf8Text
from runtime.tokenizer.tokenizer import Tokenizer

_MOST_UNFINISHED: Final = 3  # bytes of a character that lacks at least its last one


def unfinished(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bytes:
    """What there is of the character that the text of ``token_ids`` ends within; mostly nothing."""
    data = b""
    for token_id in reversed(token_ids):
        data = tokenizer.piece(token_id) + data
        if len(data) >= _MOST_UNFINISHED:
            break
    return Utf8Text(data[-_MOST_UNFINISHED:]).unfinished


class Detokenizer:
    """One output's text. Not thread-safe; one per request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special: bool,
        shown: frozenset[int] = frozenset(),
        before: bytes = b"",
        *,
        after_prompt: bool = False,
    ) -> None:
        """
        Args:
            shown: control tokens whose text is not left out even so.
            before: what is `unfinished` before the first token.
            after_prompt: the prompt's text is shown in front of this one.
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown = shown
        uncompleted = "" if after_prompt else REPLACEMENT
        self._text = Utf8Text(before, uncompleted if before else _first_space(tokenizer))

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that ``token_ids`` complete; possibly empty."""
        tokenizer = self._tokenizer
        if self._skip_special:
            shown = self._shown
            token_ids = [one for one in token_ids if not tokenizer.is_special(one) or one in shown]
        return self._text.push(b"".join(map(tokenizer.piece, token_ids)))

    def flush(self) -> str:
        """The end of the output: bytes that stayed incomplete are U+FFFD. The detokenizer starts anew."""
        text = self._text.push(b"", final=True)
        self._text = Utf8Text(left_out=_first_space(self._tokenizer))
        return text


def _first_space(tokenizer: Tokenizer) -> str:
    return " " if tokenizer.strips_first_space else ""
