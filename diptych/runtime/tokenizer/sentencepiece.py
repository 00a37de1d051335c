"""SentencePiece vocabularies of BPE models as a tokenizer of Hugging Face's library.

SentencePiece joins, again and again, the two neighbours whose joined piece has the highest score; the
library joins the pair whose merge stands first in a list. The list with the same meaning has every way to cut
a piece in two, ordered by the score of the piece (transformers converts Llama's and Gemma's vocabularies
alike). What no piece covers is spelled in bytes (``<0x0A>``). User-defined pieces are matched before all
else, the longest first, and are never a part of another piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, Final, Literal, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from diptych.runtime.tokenizer.source import AddedToken, UnusableTokenizer

SPACE: Final = "\u2581"
"""Spelling of a space in a vocabulary."""
NUM_BYTES: Final = 256

PrefixSpace = Literal["none", "always", "first"]
"""Texts that get a space before them: none, each between two control tokens, or the first of a prompt."""


class PieceKind(IntEnum):
    """Kind of a piece, numbered alike in ``tokenizer.model`` and in GGUF's ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """An entry of a vocabulary; its place is the token id."""

    text: str
    score: float
    kind: int


def byte_piece(byte: int) -> str:
    """Return the spelling of one byte, as in ``<0x0A>``."""
    return f"<0x{byte:02X}>"


def plain_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Return `pieces` with user-defined runs of spaces spelled as the spaces that they are matched against.

    Gemma's ``tokenizer.model`` spells them with `SPACE`, llama.cpp's converter with spaces.
    """
    return [
        piece._replace(text=piece.text.replace(SPACE, " ")) if piece.kind == PieceKind.USER_DEFINED else piece
        for piece in pieces
    ]


def added_tokens(pieces: Sequence[Piece]) -> tuple[AddedToken, ...]:
    """Return the control tokens and the user-defined ones."""
    return tuple(
        AddedToken(token_id, piece.text, control=piece.kind == PieceKind.CONTROL)
        for token_id, piece in enumerate(pieces)
        if piece.kind in (PieceKind.CONTROL, PieceKind.USER_DEFINED)
    )


def derive_merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Return the merges that rebuild every normal piece from two, best first."""
    normal = {piece.text: piece.score for piece in pieces if piece.kind == PieceKind.NORMAL}
    found = []
    for text, score in normal.items():
        for cut in range(1, len(text)):
            left = text[:cut]
            if left in normal and (right := text[cut:]) in normal:
                found.append((score, cut, left, right))
    found.sort(key=lambda merge: (merge[0], merge[1]), reverse=True)
    return [(left, right) for _, _, left, right in found]


def build(pieces: Sequence[Piece], prefix_space: PrefixSpace) -> tokenizers.Tokenizer:
    """Return the tokenizer of `pieces`, which come from `plain_pieces`. Raises `UnusableTokenizer`."""
    vocab = {piece.text: token_id for token_id, piece in enumerate(pieces)}
    if len(vocab) != len(pieces):
        raise UnusableTokenizer("the vocabulary holds a token twice")
    unknown = next((piece.text for piece in pieces if piece.kind == PieceKind.UNKNOWN), None)
    if unknown is None and any(byte_piece(byte) not in vocab for byte in range(NUM_BYTES)):
        raise UnusableTokenizer("the vocabulary can spell neither all bytes nor what it does not know")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=derive_merges(pieces),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    _set_spaces(backend, prefix_space)
    add_tokens(backend, added_tokens(pieces))
    return backend


def _set_spaces(backend: tokenizers.Tokenizer, prefix_space: PrefixSpace) -> None:
    decoding: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    spelled = normalizers.Replace(" ", SPACE)
    match prefix_space:
        case "none":
            backend.normalizer = spelled
        case "always":
            backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spelled])
        case "first":
            backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    if prefix_space != "none":
        decoding.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(decoding)


def add_tokens(backend: tokenizers.Tokenizer, added: Iterable[AddedToken]) -> None:
    """Have `backend` match `added` as wholes; text that spells a control token stays text."""
    for control in (True, False):
        entries = [
            tokenizers.AddedToken(
                token.text,
                special=control,
                normalized=False,
                lstrip=token.takes_left_space,
                rstrip=token.takes_right_space,
            )
            for token in added
            if token.control == control
        ]
        backend.add_special_tokens(entries) if control else backend.add_tokens(entries)
    backend.encode_special_tokens = True
