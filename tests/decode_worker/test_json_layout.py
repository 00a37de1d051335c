"""Layouts of JSON and cuts into tokens that an output shows are guessed again."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from decode_worker.json_layout import JsonPlace, SeenText

PEOPLE = [{"name": 'A "b" {,', "ages": [1, 23], "ok": True}, {"name": "c", "ages": [4, 5], "ok": False}]


class Pieces:
    """A vocabulary of all texts of up to `size` bytes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ids: dict[bytes, int] = {}

    def tokenize(self, text: bytes) -> Sequence[int]:
        pieces = [text[at : at + self._size] for at in range(0, len(text), self._size)]
        return [self._ids.setdefault(piece, len(self._ids)) for piece in pieces]

    def spelled(self, token_ids: Sequence[int]) -> bytes:
        texts = list(self._ids)
        return b"".join(texts[token] for token in token_ids)


def seen(text: bytes) -> SeenText:
    words, found = Pieces(1), SeenText()
    found.follow(words.tokenize(text), words)
    return found


@pytest.mark.parametrize("layout", [{"indent": 2}, {"indent": 5}, {"separators": (",", ":")}, {}], ids=str)
def test_the_second_of_two_objects_is_laid_out_as_the_first(layout: dict[str, object]) -> None:
    """Behind signs of the second one, white space and the sign after it are the first guess; behind a colon,
    where the grammar knows what comes, one of them.
    """
    text = json.dumps(PEOPLE, **layout).encode()  # type: ignore[arg-type]
    begin = text.index(b'"c"') + 3
    places = wrong = 0
    for at in range(begin, len(text)):
        found = seen(text[:at])
        place = found.place
        if place.in_string or place.white or place.sign == ord("0"):
            continue
        guesses = list(found.layouts(place))
        places += 1
        wrong += place.sign != ord(":") and not text.startswith(guesses[0], at)
    assert places >= 10
    assert wrong <= 3, "digits, and the last bracket"


def test_indentation_is_counted_from_the_line_of_the_sign() -> None:
    found = seen(b'{\n  "a": {\n    "b": 1\n  },\n      "c": {')
    assert next(found.layouts(found.place)) == b'\n        "'
    assert next(found.layouts(found.place.after(b"\n   "))) == b'     "'


def test_strings_and_escapes_are_no_layout() -> None:
    place = JsonPlace().after(b'{"a\\"{[,": "}')
    assert place.in_string
    assert place.depth == 1
    assert list(seen(b'{"a": "x, y').layouts(place)) == []
    assert place.after(b'"}').depth == 0


def test_a_text_is_cut_as_it_was_before() -> None:
    words, found = Pieces(4), SeenText()
    usual = words.tokenize(b'"full_name": ')
    odd = [*words.tokenize(b'"f'), *words.tokenize(b"ul"), *words.tokenize(b"l_na"), *words.tokenize(b'me":')]
    found.follow(odd, words)
    assert found.tokens_of(b'"full_name": ', words, 9) == [*odd, *words.tokenize(b" ")]
    assert found.tokens_of(b'"full_name": ', words, 2) == odd[:2]
    assert SeenText().tokens_of(b'"full_name": ', words, 9) == usual
    other = found.tokens_of(b'"full_moon"', words, 9)
    assert words.spelled(other) == b'"full_moon"'
    assert other[:2] == odd[:2]


def test_what_comes_before_is_left_out() -> None:
    words, found = Pieces(1), SeenText(3)
    found.follow(words.tokenize(b'a"b{'), words)
    assert (found.place.in_string, found.place.depth) == (False, 1)
