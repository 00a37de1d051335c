"""Tool calls of Hermes and Qwen, between tags: ``<tool_call>{"name": …}</tool_call>``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from diptych.runtime.grammar.grammar import Grammar, Kind
from gateway.tools.json_calls import Spell, call_from_json, call_rules, quoted
from gateway.tools.parser import Marker, Parsed
from gateway.tools.tool import Tool, ToolCall

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
MARKERS: Final = (OPEN, CLOSE)


class HermesParser:
    """Parser of tagged calls. A call ends at the first closing tag with a valid call before it.

    Args:
        read: returns the call that a text between the tags is, if it is one.
        open_ended: the beginning of a call may be a call as well, so that one needs its closing tag.
    """

    def __init__(
        self, read: Callable[[str], ToolCall | None] = call_from_json, *, open_ended: bool = False
    ) -> None:
        self._read = read
        self._open_ended = open_ended
        self._marker = Marker(OPEN)
        self._inside: str | None = None  # text since the opening tag
        self._looked = 0  # length of it without a closing tag that ends the call
        self._just_called = False  # only white space since the last call

    def push(self, text: str) -> Parsed:
        result = Parsed()
        rest: str | None = text
        while rest is not None:
            if self._inside is None:
                shown, after = self._marker.push(rest)
                result += Parsed(shown)
                self._just_called &= not shown
                self._inside, self._looked, rest = after, 0, None
                if after is None:
                    break
            else:
                self._inside += rest
            found, rest = self._close()
            result += found
        return result

    def finish(self) -> Parsed:
        inside, self._inside = self._inside, None
        if inside is None:
            held = self._marker.flush()
            return Parsed("" if self._just_called and held.isspace() else held)
        # The closing tag may have been cut off by a stop string.
        call = None if self._open_ended else self._read(inside)
        return Parsed(calls=(call,)) if call is not None else Parsed(self._marker.found + inside)

    def _close(self) -> tuple[Parsed, str | None]:
        """Return the call and the text after it, or (nothing, None) while the call is incomplete."""
        inside = self._inside or ""
        while (end := inside.find(CLOSE, self._looked)) >= 0:
            call = self._read(inside[:end])
            if call is not None:
                self._inside, self._just_called = None, True
                return Parsed(calls=(call,)), inside[end + len(CLOSE) :]
            self._looked = end + len(CLOSE)
        self._looked = max(self._looked, len(inside) - len(CLOSE) + 1)
        return Parsed(), None


def grammar(tools: Sequence[Tool], *, many: bool, spell: Spell = quoted) -> Grammar:
    """Return the grammar of one call, or with ``many`` of any number, each on lines of its own."""
    rules = call_rules(tools, lambda name: f'{OPEN}\n{{"name": {name}, "arguments": ', f"}}\n{CLOSE}")
    start = f"start: call ({quoted(chr(10))} call)*" if many else "start: call"
    return Grammar(Kind.LARK, "\n".join([start, *rules]))
