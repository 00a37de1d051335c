"""Calls that are JSON objects, one after the other, read from a text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Collection

from gateway.tools.json_call import call_from_json
from gateway.tools.json_objects import JsonObjects
from gateway.tools.tool import ToolCall


class CallList:
    """Holds back what may be the next call, and what stands before it, until it is one, or is not.

    Args:
        before: what may stand before the first call, possibly nothing.
        between: the same of each other one.
        tag: the only piece of the two that is longer than a character, if there is one.
        end: what ends a list of at least one call.
        names: what is called without the tag before it is one of these; None: anything is.
    """

    def __init__(
        self,
        before: re.Pattern[str],
        between: re.Pattern[str],
        *,
        tag: str = "",
        end: str = "",
        names: Collection[str] | None = None,
    ) -> None:
        self._separator = before
        self._between = between
        self._tag = tag
        self._end = end
        self._names = names
        self._objects = JsonObjects()
        self._held = ""  # since the last call
        self.called = False

    def push(self, text: str) -> tuple[tuple[ToolCall, ...], str | None]:
        """The calls that this piece completes; and, if the list ends in it, what is no part of the list."""
        calls: list[ToolCall] = []
        after: str | None = None
        while text and after is None:
            call, text, after = self._next(text)
            if call is not None:
                calls.append(call)
        return tuple(calls), after

    def finish(self) -> str:
        """What was held back and is text, as nothing follows."""
        return "" if self.called and self._between.fullmatch(self._held) else self._held

    def _next(self, text: str) -> tuple[ToolCall | None, str, str | None]:
        """A call and what follows it, or what follows the list."""
        if not self._objects.inside:
            text = self._held + text
            begin = _length(self._separator, text)
            self._held, text = text[:begin], text[begin:]
            if self._tag.startswith(text):  # nothing yet, or half of a tag
                self._held += text
                return None, "", None
            if self.called and self._end and text.startswith(self._end):
                return None, "", text.removeprefix(self._end)
            if not text.startswith("{"):
                return None, "", self._held + text
        found, rest = self._objects.push(text)
        self._held += text[: len(text) - len(rest)]
        if found is None:
            return None, "", None
        call = call_from_json(found)
        if call is None or not self._meant(call, self._held.removesuffix(found)):
            return None, "", self._held + rest
        self._held, self._separator, self.called = "", self._between, True
        return call, rest, None

    def _meant(self, call: ToolCall, before: str) -> bool:
        """Whether it is a call, not an answer that has the looks of one."""
        if self._names is None or call.name in self._names:
            return True
        return bool(self._tag) and self._tag in before


def _length(separator: re.Pattern[str], text: str) -> int:
    found = separator.match(text)
    return 0 if found is None else found.end()
