"""Incremental detokenization: text of token ids that are still coming, never half a character.

A byte-level token is any run of bytes: one emoji is often three tokens. The decoder holds the bytes of an
unfinished character back and gives U+FFFD only once no further byte could complete it. Wherever the ids are
cut between pushes, the texts of the pushes and of the flush add up to `Tokenizer.decode` of all the ids.

A prompt of token ids may end within a character, too. The output's text begins with that character if the
output completes it. If not, the unfinished bytes are no part of the output, whose text may have to be JSON.
Where the prompt is shown before the output, the prompt's text ends before that character, and an output that
does not complete it begins with U+FFFD: both together are the text of all tokens.

SentencePiece writes a space before every word. At the beginning of a text it is omitted, as by
`Tokenizer.decode`. An output that continues its prompt's text keeps it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final

from diptych.runtime.tokenizer.tokenizer import Tokenizer

REPLACEMENT: Final = "\ufffd"
_MAX_UNFINISHED: Final = 3  # bytes of a character without its last byte
_Utf8Decoder: Final = codecs.getincrementaldecoder("utf-8")


class Utf8Text:
    """Incremental UTF-8 decoder that holds the bytes of an unfinished character back.

    Args:
        before: bytes of a character that began before the first piece.
        omitted_prefix: text that is omitted at the beginning.
    """

    def __init__(self, before: bytes = b"", omitted_prefix: str = "") -> None:
        self._decoder = _Utf8Decoder("replace")
        self._decoder.decode(before)
        self._omitted_prefix = omitted_prefix

    @property
    def unfinished(self) -> bytes:
        """The bytes of the character that the input so far ends within; mostly empty."""
        return self._decoder.getstate()[0]

    def push(self, data: bytes, *, final: bool = False) -> str:
        """Return the text that ``data`` completes. With ``final`` an incomplete character is U+FFFD."""
        text = self._decoder.decode(data, final)
        if not (self._omitted_prefix and text):
            return text
        text, self._omitted_prefix = text.removeprefix(self._omitted_prefix), ""
        return text

    def copy(self) -> Utf8Text:
        """Return a decoder in the same state, for a text with several continuations."""
        same = Utf8Text(omitted_prefix=self._omitted_prefix)
        same._decoder.setstate(self._decoder.getstate())
        return same


def text_after(tokenizer: Tokenizer, prompt_ids: Sequence[int], *, prompt_shown: bool = False) -> Utf8Text:
    """Return the decoder that an output's text begins with.

    Args:
        prompt_ids: the prompt that the output continues; empty where the output is a text of its own, as an
            answer in a chat is.
        prompt_shown: the prompt's text is shown before the output.
    """
    before = _unfinished(tokenizer, prompt_ids)
    if before:
        return Utf8Text(before, "" if prompt_shown else REPLACEMENT)
    first_space = " " if tokenizer.strips_first_space and not _ends_in_text(tokenizer, prompt_ids) else ""
    return Utf8Text(omitted_prefix=first_space)


def _unfinished(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bytes:
    """Return the bytes of the character that ``token_ids`` end within; mostly empty."""
    data = b""
    for token_id in reversed(token_ids):
        data = tokenizer.piece(token_id) + data
        if len(data) >= _MAX_UNFINISHED:
            break
    return Utf8Text(data[-_MAX_UNFINISHED:]).unfinished


def _ends_in_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bool:
    """Return whether the last token with any text is not a control token."""
    last = next((one for one in reversed(token_ids) if tokenizer.piece(one)), None)
    return last is not None and not tokenizer.is_special(last)


class Detokenizer:
    """Incremental detokenizer of one output. Not thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special: bool,
        shown: frozenset[int] = frozenset(),
        text: Utf8Text | None = None,
    ) -> None:
        """
        Args:
            shown: control tokens whose text is kept in spite of ``skip_special``.
            text: the decoder from `text_after`, for this output alone; None: a text of its own.
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown = shown
        self._text = text_after(tokenizer, ()) if text is None else text

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that ``token_ids`` complete, possibly empty."""
        tokenizer = self._tokenizer
        if self._skip_special:
            shown = self._shown
            token_ids = [one for one in token_ids if not tokenizer.is_special(one) or one in shown]
        return self._text.push(b"".join(map(tokenizer.piece, token_ids)))

    def flush(self) -> str:
        """End the output: return U+FFFD for an incomplete character. The detokenizer starts anew."""
        text = self._text.push(b"", final=True)
        self._text = text_after(self._tokenizer, ())
        return text
