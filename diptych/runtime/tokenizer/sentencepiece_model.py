"""Reader of ``tokenizer.model``, a SentencePiece model: the few fields that decide its tokens.

The file is one protobuf message (github.com/google/sentencepiece, sentencepiece_model.proto), read here by
its wire format: of some fifty fields eight are needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from diptych.runtime.tokenizer.sentencepiece import Piece, PieceKind
from diptych.runtime.tokenizer.source import UnusableTokenizer

_NAME: Final = "tokenizer.model"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # of ModelProto
_TEXT, _SCORE, _KIND = 1, 2, 3  # of SentencePiece
_MODEL_TYPE: Final = 3  # of TrainerSpec
_CHARSMAP, _DUMMY_PREFIX, _REMOVES_SPACES = 2, 3, 4  # of NormalizerSpec
_MODEL_TYPES: Final = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_BPE: Final = 2
_MAX_VARINT_BITS: Final = 64


@dataclass(frozen=True)
class SentencePieceModel:
    """Content of a ``tokenizer.model`` that this build can use."""

    pieces: tuple[Piece, ...]
    adds_prefix_space: bool


def parse(data: bytes) -> SentencePieceModel:
    """Return the model in `data`. Raises `UnusableTokenizer` if it is damaged or of a kind not computed."""
    pieces: list[Piece] = []
    adds_prefix, removes_spaces, charsmap, model_type = True, True, False, 1  # the message's own defaults
    for field, value in _fields(data):
        if field == _PIECES and isinstance(value, bytes):
            pieces.append(_piece(value))
        elif field == _TRAINER and isinstance(value, bytes):
            model_type = int(dict(_numbers(value)).get(_MODEL_TYPE, model_type))
        elif field == _NORMALIZER and isinstance(value, bytes):
            numbers = dict(_numbers(value))
            adds_prefix = bool(numbers.get(_DUMMY_PREFIX, 1))
            removes_spaces = bool(numbers.get(_REMOVES_SPACES, 1))
            charsmap = any(at == _CHARSMAP and one for at, one in _fields(value))
    if not pieces:
        raise UnusableTokenizer(f"{_NAME} holds no vocabulary")
    if model_type != _BPE:
        named = _MODEL_TYPES.get(model_type, str(model_type))
        raise UnusableTokenizer(f"{_NAME} is a SentencePiece model of type {named}; this build has bpe")
    if charsmap or removes_spaces:
        what = "rewrites characters" if charsmap else "joins runs of spaces"
        raise UnusableTokenizer(f"{_NAME} {what} before it tokenizes, which is not computed")
    return SentencePieceModel(tuple(pieces), adds_prefix)


def _piece(data: bytes) -> Piece:
    text, score, kind = "", 0.0, int(PieceKind.NORMAL)
    for field, value in _fields(data):
        if field == _TEXT and isinstance(value, bytes):
            try:
                text = value.decode("utf-8")
            except UnicodeDecodeError:
                raise UnusableTokenizer(f"{_NAME}: a piece is not UTF-8") from None
        elif field == _SCORE and isinstance(value, float):
            score = value
        elif field == _KIND and isinstance(value, int):
            kind = value
    return Piece(text, score, kind)


def _numbers(data: bytes) -> Iterator[tuple[int, int]]:
    return ((field, value) for field, value in _fields(data) if isinstance(value, int))


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Return number and value of each field: varints as int, 32 bits as float, the rest as bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        field, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield field, value
            continue
        size = 8 if wire == _FIXED64 else 4
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif wire not in (_FIXED64, _FIXED32):
            raise UnusableTokenizer(f"{_NAME} is no SentencePiece model: wire type {wire}")
        if size > len(data) - at:
            raise UnusableTokenizer(f"{_NAME} is cut short or no SentencePiece model")
        part = data[at : at + size]
        yield field, struct.unpack("<f", part)[0] if wire == _FIXED32 else part
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, _MAX_VARINT_BITS, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise UnusableTokenizer(f"{_NAME} is cut short or no SentencePiece model")
