"""Interface of tool call parsers: pieces of text in, text and calls out.

Text outside calls is returned at once, except for an end that may be the beginning of a call. Text that turns
out to be no call is returned as text: nothing is lost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Protocol

from gateway.tools.tool import ToolCall

TO_AN_END: Final = re.compile(r"[^}\]>]*[}\]>]|[^}\]>]+")
"""Pieces that end where a call may end: every format closes a call with one of these characters."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """Text and calls found in a piece of text."""

    text: str = field(default="", repr=False)
    calls: tuple[ToolCall, ...] = ()

    def __add__(self, later: Parsed) -> Parsed:
        return Parsed(self.text + later.text, self.calls + later.calls)


class ToolCallParser(Protocol):
    """Parser of one output."""

    def push(self, text: str) -> Parsed:
        """Add the next piece of text."""
        ...

    def finish(self) -> Parsed:
        """End the output: return what was held back, as a call if it is one, else as text."""
        ...


class FirstCall:
    """Parser of an output that ends with its first call.

    Args:
        parser: a new parser of the output's format.
    """

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser
        self._called = False

    def push(self, text: str) -> Parsed:
        result = Parsed()
        # In a piece with text after a call, the result would not tell which text comes after it.
        for piece in TO_AN_END.findall(text):
            if self._called:
                break
            result += self._parser.push(piece)
            self._called = any(not call.partial for call in result.calls)
        return result

    def finish(self) -> Parsed:
        return Parsed() if self._called else self._parser.finish()


class Marker:
    """Search for a marker that begins calls; white space before the marker belongs to it."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""
        self.found = marker  # as written, with the white space before it

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text to show now, and the text after the marker if it is complete, else None."""
        seen = self._held + text
        before, marker, after = seen.partition(self._marker)
        if marker:
            shown = before.rstrip()
            self._held, self.found = "", before[len(shown) :] + marker
            return shown, after
        end = len(seen) - self._partial(seen)
        cut = len(seen[:end].rstrip())
        self._held = seen[cut:]
        return seen[:cut], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _partial(self, seen: str) -> int:
        """Return how many characters at the end of ``seen`` may be the marker's beginning."""
        longest = min(len(seen), len(self._marker) - 1)
        return next((n for n in range(longest, 0, -1) if seen.endswith(self._marker[:n])), 0)
