"""Control tokens of a rendered chat template, told from a caller's words.

A template pastes message contents between control tokens such as ``<|im_end|>``. A content that spells a
control token must not become one, or its author could end the turn and speak as someone else. Cutting the
contents out of the template by placeholders would break templates that look at them (trim them, split them
at ``</think>``), so each content passes through the template with its *lookalikes defused*: the first
character of whatever spells a control token, or could complete one across the content's border, is swapped
for a lone surrogate that stands for it. No text from protobuf can hold a surrogate, so the swap is undone
exactly; every control token found in the rendered text was written by the template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from diptych.runtime.tokenizer.source import AddedToken

_FIRST_SURROGATE: Final = 0xD800
_NUM_SURROGATES: Final = 0x800


class ControlToken(NamedTuple):
    """A control token that a template wrote; ``text`` includes white space the token takes in."""

    token_id: int
    text: str


class ControlTokens:
    """The control tokens of one model: defuse contents before rendering, split the text after."""

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        texts = [token.text for token in tokens if token.text]
        self._id_of = {token.text: token.token_id for token in tokens}
        # Longest first: the alternation then matches leftmost-longest, as the tokenizer library does.
        ordered = sorted((token for token in tokens if token.text), key=lambda token: -len(token.text))
        self._token = re.compile("|".join(map(_literal, ordered))) if ordered else None
        # Case is ignored so that a template which lowers or raises a content cannot arm it again.
        lookalike = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
        self._lookalike = re.compile(f"(?={lookalike})", re.IGNORECASE) if texts else None
        self._beginnings = frozenset(text[:size] for text in texts for size in range(1, len(text)))
        self._endings = frozenset(text[-size:] for text in texts for size in range(1, len(text)))
        self._longest = max(map(len, texts), default=0)
        self._stand_in = _stand_ins(texts)
        self._original = {ord(mark): char for char, mark in self._stand_in.items()}

    def defuse(self, content: str) -> str:
        """``content`` with every lookalike's first character swapped for its stand-in (same length)."""
        if self._lookalike is None:
            return content
        marked = {found.start() for found in self._lookalike.finditer(content)}
        marked.update(self._border_lookalikes(content))
        if not marked:
            return content
        chars = list(content)
        for at in marked:
            chars[at] = self._stand_in.get(chars[at], chars[at])
        return "".join(chars)

    def restore(self, text: str) -> str:
        """Undo `defuse`."""
        return text.translate(self._original)

    def split(self, rendered: str) -> tuple[ControlToken | str, ...]:
        """Control tokens and restored text, in order; no empty text."""
        return tuple(self._split(rendered))

    def _split(self, rendered: str) -> Iterator[ControlToken | str]:
        at = 0
        for found in self._token.finditer(rendered) if self._token is not None else ():
            if found.start() > at:
                yield self.restore(rendered[at : found.start()])
            text = found.group()
            yield ControlToken(self._id_of[text if text in self._id_of else text.strip()], text)
            at = found.end()
        if at < len(rendered):
            yield self.restore(rendered[at:])

    def _border_lookalikes(self, content: str) -> Iterator[int]:
        """Return the positions where the content could complete a token that the text around it begins or
        ends.

        Looked at both with the outer white space and without, since templates trim.
        """
        for text, shift in _with_and_without_space(content):
            reach = min(self._longest - 1, len(text))
            if any(text[:size] in self._endings for size in range(1, reach + 1)):
                yield shift
            for size in range(1, reach + 1):
                if text[-size:] in self._beginnings:
                    yield shift + len(text) - size


def _literal(token: AddedToken) -> str:
    left = r"\s*" if token.takes_left_space else ""
    right = r"\s*" if token.takes_right_space else ""
    return f"{left}{re.escape(token.text)}{right}"


def _stand_ins(texts: Iterable[str]) -> dict[str, str]:
    chars = {form for text in texts for char in text for form in (char, char.lower(), char.upper())}
    single = sorted(char for char in chars if len(char) == 1)[:_NUM_SURROGATES]
    return {char: chr(_FIRST_SURROGATE + index) for index, char in enumerate(single)}


def _with_and_without_space(content: str) -> Iterator[tuple[str, int]]:
    if content:
        yield content, 0
    trimmed = content.strip()
    if trimmed and len(trimmed) != len(content):
        yield trimmed, len(content) - len(content.lstrip())
