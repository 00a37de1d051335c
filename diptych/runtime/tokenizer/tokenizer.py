"""Text to token ids and back, from the model file itself.

A caller's text never becomes a control token: `encode` reads ``<|im_start|>`` as thirteen characters.
Control tokens enter a prompt only through `encode_parts`, whose parts a chat template made (see
`diptych.runtime.tokenizer.control_tokens`), or as ids the caller sent on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import tokenizers

from diptych.runtime.tokenizer import gguf_tokenizer, hf_tokenizer
from diptych.runtime.tokenizer.byte_level import read_bytes
from diptych.runtime.tokenizer.control_tokens import ControlToken, ControlTokens
from diptych.runtime.tokenizer.end_tokens import turn_end_ids, union
from diptych.runtime.tokenizer.sentencepiece import SPACE
from diptych.runtime.tokenizer.source import TokenizerSource, UnusableTokenizer

__all__ = ["Encoding", "Tokenizer", "UnusableTokenizer"]

# Unicode normalisation can shorten text before it is tokenized; no composition shrinks it more.
_NORMALIZER_SHRINK: Final = 4


class Encoding(NamedTuple):
    """Token ids with their spelling in the vocabulary and their [start, end) in characters of the text."""

    ids: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int]]


class Tokenizer:
    """Immutable after loading; safe to use from several threads.

    Texts go to the library as batches of one: only these release the GIL.
    """

    def __init__(self, source: TokenizerSource) -> None:
        self._source = source
        self._pieces: list[bytes | None] = [None] * source.vocab_size
        self._control_ids = frozenset(token.token_id for token in source.added if token.control)
        self._added_text = {token.token_id: token.text for token in source.added}
        self._longest = self._longest_token()
        self.control_tokens: ControlTokens = ControlTokens([token for token in source.added if token.control])

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Load from a ``.gguf`` file or a Hugging Face folder. Raises `UnusableTokenizer` or `OSError`."""
        return cls(hf_tokenizer.read(path) if path.is_dir() else gguf_tokenizer.read(path))

    def with_chat_template(self, template: str) -> Tokenizer:
        """Return the same tokenizer with `template` in place of the model's own.

        The tokens that `template` ends a turn with end an output, too.
        """
        ends = union([*self.eos_token_ids, *turn_end_ids(self._source.added, [template])], self.vocab_size)
        return Tokenizer(
            replace(self._source, chat_template=template, tool_template=None, eos_token_ids=ends)
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids the model knows; every id below it is valid as input."""
        return self._source.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._source.eos_token_ids

    @property
    def digest(self) -> str:
        """sha256 (hex) of all that decides a tokenization."""
        return self._source.digest

    @property
    def chat_template(self) -> str | None:
        return self._source.chat_template

    @property
    def tool_template(self) -> str | None:
        """Template in place of `chat_template` in conversations with tools, if the model has one."""
        return self._source.tool_template

    @property
    def template_names(self) -> Mapping[str, str]:
        """Names that a chat template may use for special tokens: ``bos_token``, ``eos_token``, …"""
        return self._source.template_names

    @property
    def max_context(self) -> int:
        return self._source.max_context

    @property
    def generation_defaults(self) -> Mapping[str, object]:
        """generation_config.json as it is; empty for a GGUF file."""
        return self._source.generation_defaults

    @property
    def strips_first_space(self) -> bool:
        """True where decoded text loses one leading space (SentencePiece models)."""
        return self._source.strips_first_space

    def is_special(self, token_id: int) -> bool:
        """Return whether ``token_id`` is a control token, which `decode` leaves out when asked to."""
        return token_id in self._control_ids

    def fewest_tokens(self, num_bytes: int) -> int:
        """Return a lower bound on the tokens of any text of ``num_bytes`` UTF-8 bytes."""
        return num_bytes // self._longest

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Return the ids of ``text``, special-token text as plain text.

        ``add_special`` adds the model's own BOS/EOS.
        """
        return _ids(self._source.backend, text, add_special)

    def encode_with_offsets(self, text: str, add_special: bool = False) -> Encoding:
        """Encode as `encode` does, with spelling and position of each token (an added BOS has position (0,
        0)).
        """
        (found,) = self._source.backend.encode_batch([text], add_special_tokens=add_special)
        return Encoding(found.ids, found.tokens, found.offsets)

    def encode_parts(self, parts: Sequence[ControlToken | str]) -> list[int]:
        """Return the ids of a rendered chat template: control tokens as such, text between them as plain
        text.
        """
        ids: list[int] = []
        backend = self._source.backend
        for part in parts:
            if isinstance(part, ControlToken):
                ids.append(part.token_id)
            else:
                ids.extend(_ids(backend, part, add_special=False))
            backend = self._source.continuation
        return ids

    def decode(self, token_ids: Iterable[int], skip_special: bool) -> str:
        """Text of ``token_ids``; invalid UTF-8 becomes U+FFFD, ids outside the vocabulary nothing."""
        data = b"".join(
            self.piece(token_id)
            for token_id in token_ids
            if not (skip_special and token_id in self._control_ids)
        )
        text = data.decode("utf-8", "replace")
        return text[1:] if self._source.strips_first_space and text.startswith(" ") else text

    def id_of(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, control tokens included."""
        found: int | None = self._source.backend.token_to_id(token)
        return found

    def token_text(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it; empty for ids that only pad the embedding."""
        return self._source.backend.id_to_token(token_id) or ""

    def piece(self, token_id: int) -> bytes:
        """Return the bytes one token stands for: a part of a character, a word, several words."""
        if not 0 <= token_id < self._source.vocab_size:
            return b""
        piece = self._pieces[token_id]
        if piece is None:
            # Computed at first use: a whole table would double the load time for tokens never seen.
            piece = self._pieces[token_id] = self._spell(token_id)
        return piece

    def _spell(self, token_id: int) -> bytes:
        added = self._added_text.get(token_id)
        if added is not None:
            # Gemma's runs of spaces are such tokens, spelled as in the vocabulary.
            spaces = self._source.alphabet == "byte_fallback"
            return (added.replace(SPACE, " ") if spaces else added).encode("utf-8")
        token = self._source.backend.id_to_token(token_id)
        if token is None:
            return b""
        return read_bytes(token) if self._source.alphabet == "byte_level" else _from_byte_fallback(token)

    def _longest_token(self) -> int:
        """Longest token in bytes: byte-level tokens have one character a byte, others at most four."""
        longest = max(map(len, self._source.backend.get_vocab(with_added_tokens=True)), default=1)
        if self._source.alphabet == "byte_fallback" or self._source.backend.normalizer is not None:
            longest *= _NORMALIZER_SHRINK
        return longest


def _ids(backend: tokenizers.Tokenizer, text: str, add_special: bool) -> list[int]:
    """Encode without offsets, which would cost a third more."""
    (found,) = backend.encode_batch_fast([text], add_special_tokens=add_special)
    ids: list[int] = found.ids
    return ids


def _from_byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(SPACE, " ").encode("utf-8")
