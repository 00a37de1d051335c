"""What a parser of tool calls is: text in as it comes, text and calls out.

Text outside calls goes out at once, but for its end where that may turn out to be the beginning of a call.
What turns out to be no call after all comes out as the text that it is, so that nothing is ever lost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Protocol

from gateway.tools.tool import ToolCall

_TO_AN_END: Final = re.compile(r"[^}\]>]*[}\]>]|[^}\]>]+")
"""Pieces that end where a call may end: all formats close it with one of these."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a piece of text came to."""

    text: str = field(default="", repr=False)
    calls: tuple[ToolCall, ...] = ()

    def __add__(self, later: Parsed) -> Parsed:
        return Parsed(self.text + later.text, self.calls + later.calls)


class ToolCallParser(Protocol):
    """Reads one output."""

    def push(self, text: str) -> Parsed:
        """The next piece."""
        ...

    def finish(self) -> Parsed:
        """The output is over: what was held back, as a call if it is one, else as text."""
        ...


class FirstCall:
    """What another parser reads, up to the end of the first call: the output ends there.

    Args:
        parser: a fresh one.
    """

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser
        self._called = False

    def push(self, text: str) -> Parsed:
        result = Parsed()
        # A piece that goes on after a call would not say which of its text comes after it.
        for piece in _TO_AN_END.findall(text):
            if self._called:
                break
            result += self._parser.push(piece)
            self._called = bool(result.calls)
        return result

    def finish(self) -> Parsed:
        return Parsed() if self._called else self._parser.finish()


class Marker:
    """Watches text for a marker that begins calls; white space before the marker belongs to it."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""
        self.found = marker  # as it came, with the white space before it

    def push(self, text: str) -> tuple[str, str | None]:
        """Text to show now, and what follows the marker if it has come."""
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
        """How many characters at the end may be the marker's beginning."""
        longest = min(len(seen), len(self._marker) - 1)
        return next((n for n in range(longest, 0, -1) if seen.endswith(self._marker[:n])), 0)
