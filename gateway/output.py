"""Output tokens of one request → the pieces that its client gets: text, ids, stops, coalescing, the bill.

What stops the output:

- A stop string, found here. What the workers produced beyond the token that completed it is neither shown nor
  billed. Nothing of the match is shown unless the client wants it.
- A stop token id (end of sequence included), found by the worker, always the last token. Its id is shown and
  billed, as other engines do, its text only with ``include_stop_in_output`` (and then still subject to
  ``skip_special_tokens``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.detokenizer import Detokenizer
from gateway.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new since the last piece. ``tokens`` counts it even when ids are not wanted."""

    text: str = field(default="", repr=False)
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    tokens: int = 0

    def __add__(self, later: Delta) -> Delta:
        return Delta(self.text + later.text, self.token_ids + later.token_ids, self.tokens + later.tokens)


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What ended the output: one of the two is set."""

    text: str | None = field(default=None, repr=False)
    token_id: int | None = None


class OutputStream:
    """The output of one request.

    Args:
        detokenizer: a fresh one; None when the client wants no text and set no stop strings.
        stops: the client's stop strings; None when it set none.
        stop_ids: the ids at which workers stop.
        include_stop: show what stopped the output.
        min_tokens: until there are this many, stop strings are text like any other.
        interval: tokens per piece, at least 1. The first token and the last piece go at once.
    """

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        stops: StopStrings | None,
        *,
        stop_ids: frozenset[int],
        include_stop: bool,
        min_tokens: int,
        interval: int,
        want_text: bool,
        want_token_ids: bool,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_ids = stop_ids
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._interval = interval
        self._want_text = want_text
        self._want_token_ids = want_token_ids
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._pending = 0  # tokens since the last piece
        self.billed = 0
        self.stop_match: StopMatch | None = None

    def push(self, token_ids: Sequence[int]) -> bool:
        """Take new tokens in. True: a stop string is complete after ``billed`` tokens; drop the rest."""
        if self._stops is None:  # nothing to find between two tokens: detokenise them in one go
            self._push_all(token_ids)
            return False
        for token_id in token_ids:
            self._push_all((token_id,))
            if self.stop_match is not None and self.stop_match.text is not None:
                return True
        return False

    def take(self) -> Delta | None:
        """The next piece, if one is due."""
        due = self.billed == self._pending or self._pending >= self._interval
        # Half a character, or a possible stop string, is no news to a client that wants text alone.
        empty = not self._want_token_ids and not self._text
        return self._take() if due and self._pending and not empty else None

    def finish(self) -> Delta:
        """The last piece: what was held back, unless a stop string swallowed it."""
        if self._detokenizer is not None and not self._stopped_by_text():
            tail = self._detokenizer.flush()
            if self._stops is not None:
                self._text_found(tail)
                tail = "" if self._stopped_by_text() else self._stops.flush()
            if tail:
                self._text.append(tail)
        return self._take()

    def _push_all(self, token_ids: Sequence[int]) -> None:
        self._token_ids.extend(token_ids)
        self._pending += len(token_ids)
        self.billed += len(token_ids)
        if token_ids and token_ids[-1] in self._stop_ids:
            self.stop_match = StopMatch(token_id=token_ids[-1])
            if not self._include_stop:
                token_ids = token_ids[:-1]
        if self._detokenizer is None or not token_ids:
            return
        text = self._detokenizer.push(token_ids)
        if self._stops is not None and self.billed >= self._min_tokens:
            self._text_found(text)
        elif text:
            self._text.append(text)

    def _text_found(self, text: str) -> None:
        if self._stops is None or not text:
            return
        result = self._stops.push(text)
        if result.text_to_emit:
            self._text.append(result.text_to_emit)
        if result.matched is not None:
            self.stop_match = StopMatch(text=result.matched)

    def _stopped_by_text(self) -> bool:
        return self.stop_match is not None and self.stop_match.text is not None

    def _take(self) -> Delta:
        delta = Delta(
            "".join(self._text) if self._want_text else "",
            tuple(self._token_ids) if self._want_token_ids else (),
            self._pending,
        )
        self._text.clear()
        self._token_ids.clear()
        self._pending = 0
        return delta
