"""Token ids to text while they are still coming, never half a character.

A byte-level token is any run of bytes: one emoji is often three tokens. The decoder keeps the bytes of an
unfinished character back and gives U+FFFD only once no further byte could complete it. Whatever the cuts
between pushes, the pushed texts and the flush add up to `Tokenizer.decode` of all the ids.

A prompt of token ids may end within a character, too. The output's text begins with that character if the
output completes it. If it does not, what there is of it is no part of the output, whose text may have to be
JSON, say. Where the prompt is shown in front of the output its text ends before that character, and an output
that does not complete it begins with U+FFFD: both together are the text of all tokens.

SentencePiece writes a space before every word. Where a text begins it is left out, as by `Tokenizer.decode`.
An output that goes on with its prompt's text keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from diptych.runtime.tokenizer.tokenizer import Tokenizer
from gateway.output.utf8_text import REPLACEMENT, Utf8Text

_MOST_UNFINISHED: Final = 3  # bytes of a character that lacks at least its last one


def text_after(tokenizer: Tokenizer, prompt_ids: Sequence[int], *, prompt_shown: bool = False) -> Utf8Text:
    """Where the text of an output begins.

    Args:
        prompt_ids: what it goes on with; none where it is a text of its own, as an answer in a chat is.
        prompt_shown: the prompt's text is shown in front of it.
    """
    before = _unfinished(tokenizer, prompt_ids)
    if before:
        return Utf8Text(before, "" if prompt_shown else REPLACEMENT)
    first_space = " " if tokenizer.strips_first_space and not _ends_in_text(tokenizer, prompt_ids) else ""
    return Utf8Text(left_out=first_space)


def _unfinished(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bytes:
    """What there is of the character that the text of ``token_ids`` ends within; mostly nothing."""
    data = b""
    for token_id in reversed(token_ids):
        data = tokenizer.piece(token_id) + data
        if len(data) >= _MOST_UNFINISHED:
            break
    return Utf8Text(data[-_MOST_UNFINISHED:]).unfinished


def _ends_in_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bool:
    """Whether the last of them is no control token; those that stand for nothing do not count."""
    last = next((one for one in reversed(token_ids) if tokenizer.piece(one)), None)
    return last is not None and not tokenizer.is_special(last)


class Detokenizer:
    """One output's text. Not thread-safe; one per request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special: bool,
        shown: frozenset[int] = frozenset(),
        text: Utf8Text | None = None,
    ) -> None:
        """
        Args:
            shown: control tokens whose text is not left out even so.
            text: what `text_after` says, for this output alone; None = a text of its own.
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown = shown
        self._text = text_after(tokenizer, ()) if text is None else text

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
        self._text = text_after(self._tokenizer, ())
        return text
