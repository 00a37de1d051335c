"""A small SentencePiece vocabulary, its ``tokenizer.model``, and SentencePiece's own algorithm on it.

The algorithm of github.com/google/sentencepiece, bpe_model.cc, in its plain form: user-defined pieces are
matched first, then the two neighbours are joined whose piece has the highest score, the leftmost of equals.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise

from diptych.runtime.tokenizer.sentencepiece import Piece, PieceKind, byte_piece

SPACE = "\u2581"
_WORDS = (
    "▁the quick ▁quick brown ▁brown fox ▁fox lazy dog ▁jumps over ing er on ▁a in th ▁th he qu ck ow um ps "
    "▁. 12 34 123 你好 世界 ▁▁ ▁▁▁▁ !! aa aaa ab aba"
)


def small_pieces(*, gemma: bool = False) -> list[Piece]:
    """Return a vocabulary with all bytes; `gemma`: with runs of spaces, line ends and tags user-defined."""
    pieces = [Piece("<unk>", 0.0, PieceKind.UNKNOWN)]
    pieces += [Piece(text, 0.0, PieceKind.CONTROL) for text in ("<s>", "</s>", "<end_of_turn>")]
    if gemma:
        own = ["\n", "\n\n", SPACE * 2, SPACE * 3, SPACE * 4, "<b>", "</b>"]
        pieces += [Piece(text, 0.0, PieceKind.USER_DEFINED) for text in own]
    pieces += [Piece(byte_piece(byte), 0.0, PieceKind.BYTE) for byte in range(256)]
    known = {piece.text for piece in pieces}
    words = [word for word in _WORDS.split() if word not in known]
    parts = {word[:size] for word in words for size in range(2, len(word))} - known - set(words)
    singles = sorted({char for word in words for char in word} | set("<>s/bunkefdor_ty"))
    joined = [*words, *sorted(parts), *singles]
    return pieces + [Piece(text, -float(at), PieceKind.NORMAL) for at, text in enumerate(joined)]


def sentencepiece_encode(pieces: Sequence[Piece], text: str, *, prefix: bool) -> list[int]:
    """Return the ids that SentencePiece gives to `text`."""
    ids = {piece.text: at for at, piece in enumerate(pieces)}
    score = {piece.text: piece.score for piece in pieces if piece.kind == PieceKind.NORMAL}
    user = sorted((one.text for one in pieces if one.kind == PieceKind.USER_DEFINED), key=len, reverse=True)
    rest = (SPACE if prefix and text else "") + text.replace(" ", SPACE)
    symbols: list[tuple[str, bool]] = []
    while rest:
        whole = next((one for one in user if rest.startswith(one)), None)
        symbols.append((whole or rest[0], whole is not None))
        rest = rest[len(symbols[-1][0]) :]
    while True:
        best = max(
            (
                (score[left + right], -at)
                for at, ((left, frozen), (right, also)) in enumerate(pairwise(symbols))
                if not frozen and not also and left + right in score
            ),
            default=None,
        )
        if best is None:
            break
        at = -best[1]
        symbols[at : at + 2] = [(symbols[at][0] + symbols[at + 1][0], False)]
    found: list[int] = []
    for symbol, frozen in symbols:
        if frozen or symbol in score:
            found.append(ids[symbol])
        else:
            found += [ids[byte_piece(byte)] for byte in symbol.encode("utf-8")]
    return found


def model_file(
    pieces: Iterable[Piece],
    *,
    model_type: int = 2,
    prefix: bool = True,
    joins_spaces: bool = False,
    charsmap: bytes = b"",
) -> bytes:
    """Return the ``tokenizer.model`` of `pieces`."""
    parts = [_message(1, _piece(piece)) for piece in pieces]
    parts.append(_message(2, _number(3, model_type) + _number(4, 32)))
    normalizer = _message(1, b"identity") + (_message(2, charsmap) if charsmap else b"")
    parts.append(_message(3, normalizer + _number(3, int(prefix)) + _number(4, int(joins_spaces))))
    return b"".join(parts)


def _piece(piece: Piece) -> bytes:
    score = _varint(2 << 3 | 5) + struct.pack("<f", piece.score)
    return _message(1, piece.text.encode()) + score + _number(3, piece.kind)


def _message(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])
