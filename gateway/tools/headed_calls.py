"""Calls that are a header with the tool's name and a JSON object of arguments, the part such formats share.

`HeadedCallParser` reads them from a text that comes in pieces, `begun_headed_call` the beginning of one, and
`headed_call_rules` makes the Lark rules of an output that is constrained to them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from diptych.runtime.grammar.matcher import embedded_schema
from gateway.tools.json_calls import BegunCall, JsonObjects, is_json_object, new_call_id
from gateway.tools.parser import Marker, Parsed
from gateway.tools.tool import Tool, ToolCall

_LONGEST_HEADER: Final = 512
_SPACE: Final = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class HeadedForm:
    """Form of such calls.

    Attributes:
        opens: text that begins a list of calls.
        begins: text that begins each call of a list; empty: ``opens`` begins one call, and no list.
        header: pattern of the text from there to the brace of the arguments; its first group is the name,
            its second, if there is one, the call's id.
        ends: marks that may follow a call and are no text.
    """

    opens: str
    begins: str
    header: re.Pattern[str]
    ends: tuple[str, ...] = ()

    def named(self, header: re.Match[str]) -> tuple[str, str]:
        """Return name and id of a call by its header."""
        return header[1], (header[2] if self.header.groups > 1 else "") or new_call_id()


class HeadedCallParser:
    """Parser of such calls, with text between them.

    Args:
        form: of the calls.
        begun: the prompt ends with the text that opens them.
    """

    def __init__(self, form: HeadedForm, *, begun: bool = False) -> None:
        self._form = form
        self._marker = Marker(form.opens)
        self._held: str | None = "" if begun else None  # text since the mark or the last call
        self._mark = ""  # text as well if no call follows it
        self._call: tuple[str, str] | None = None  # whose arguments come
        self._objects = JsonObjects()
        self._just_called = False  # only white space and marks since the last call

    def push(self, text: str) -> Parsed:
        result = Parsed()
        rest: str | None = text
        while rest:
            if self._held is None:
                shown, rest = self._marker.push(rest)
                self._just_called &= not shown
                result += Parsed(shown)
                if rest is not None:
                    self._held, self._mark = "", self._marker.found
                continue
            found, rest = self._arguments(rest) if self._call else self._header(rest)
            result += found
        return result

    def finish(self) -> Parsed:
        if self._held is None:
            held = self._marker.flush()
            return Parsed("" if self._just_called and held.isspace() else held)
        held, self._held, self._call = self._held, None, None
        return Parsed("" if self._just_called and not self._after_marks(held) else self._mark + held)

    def _header(self, text: str) -> tuple[Parsed, str | None]:
        """Read a header, or what follows a call; return what is certain and the text that is left."""
        self._held = (self._held or "") + text
        body = self._after_marks(self._held)
        header = self._form.header.match(body)
        if header is not None:
            self._call = self._form.named(header)
            self._held = self._held[: len(self._held) - len(body) + header.end()]
            return Parsed(), body[header.end() :]
        if self._may_be_header(body):
            return Parsed(), None
        held, self._held = self._held, None
        if self._just_called:
            return Parsed(), body
        return Parsed(self._mark), held

    def _arguments(self, text: str) -> tuple[Parsed, str | None]:
        found, rest = self._objects.push(text)
        self._held = (self._held or "") + text[: len(text) - len(rest)]
        if found is None or self._call is None:
            return Parsed(), None
        (name, call_id), self._call = self._call, None
        if not is_json_object(found):
            held, self._held = self._held, None
            return Parsed(self._mark + held), rest
        self._just_called, self._mark = True, ""
        self._held = "" if self._form.begins else None
        return Parsed(calls=(ToolCall(name, found, call_id),)), rest

    def _after_marks(self, text: str) -> str:
        """Return the text after white space and the marks that end calls."""
        while True:
            text = text[_SPACE.match(text).end() :]  # type: ignore[union-attr]  # matches everything
            mark = next((mark for mark in self._form.ends if text.startswith(mark)), None)
            if mark is None:
                return text
            text = text.removeprefix(mark)

    def _may_be_header(self, body: str) -> bool:
        """Return whether more text could make a header of ``body``."""
        if not body or any(mark.startswith(body) for mark in (self._form.begins, *self._form.ends)):
            return True
        return body.startswith(self._form.begins) and len(body) < _LONGEST_HEADER and "{" not in body


def begun_headed_call(text: str, names: Collection[str], form: HeadedForm) -> BegunCall | None:
    """Return the call of one of ``names`` that a header in ``text`` begins, if it does."""
    mark = form.begins or form.opens
    after = text.find(mark) + (0 if form.begins else len(mark))
    for body in (text.lstrip(), text[after:].lstrip()) if mark in text else (text.lstrip(),):
        header = form.header.match(body)
        if header is not None and header[1] in names:
            name, call_id = form.named(header)
            return BegunCall(name, body[header.end() :], call_id)
    return None


def headed_call_rules(tools: Sequence[Tool], head: Callable[[str], str], tail: str = "") -> list[str]:
    """Return the Lark rules of ``call``: one of the tools, its arguments by its schema between head and tail.

    Args:
        head: the terms before the arguments, made from the tool's name.
        tail: the terms after them.
    """
    rules = ["call: " + " | ".join(f"call{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        rules.append(f"call{number}: {head(tool.name)} {embedded_schema(tool.arguments_schema)} {tail}")
    return rules
