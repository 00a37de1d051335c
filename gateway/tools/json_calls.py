"""Tool calls as JSON objects of a name and arguments, the part that all formats have in common.

`CallList` reads calls from a text that comes in pieces, `call_from_json` reads one, and `call_rules` makes
the Lark rules of an output that is constrained to calls.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

from diptych.runtime.grammar.matcher import embedded_schema
from diptych.runtime.strict_json import STRICT_JSON
from gateway.tools.tool import Tool, ToolCall

_ALPHABET: Final = string.ascii_letters + string.digits
_NAME_OF_MEMBER: Final = re.compile(r'[\s{,]*("(?:[^"\\]|\\.)*")\s*:\s*')


class CallList:
    """Calls one after the other. Text that may be the next call, or stands before it, is held back.

    Args:
        before: pattern of the text allowed before the first call.
        between: pattern of the text allowed before each other call.
        tag: the only part of the two patterns that is longer than a character, if any.
        end: text that ends a list of at least one call.
        names: of the tools; an untagged object with another name is no call. None: any name is a tool's.
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
        """Return the calls that this piece completes and, if the list ends in it, the text after the list."""
        calls: list[ToolCall] = []
        after: str | None = None
        while text and after is None:
            call, text, after = self._next(text)
            if call is not None:
                calls.append(call)
        return tuple(calls), after

    def finish(self) -> str:
        """End the output: return the text held back, which is no call."""
        return "" if self.called and self._between.fullmatch(self._held) else self._held

    def _next(self, text: str) -> tuple[ToolCall | None, str, str | None]:
        """Return a call (or None), the text after it, and the text after the list if it ended (or None)."""
        if not self._objects.inside:
            text = self._held + text
            begin = _match_length(self._separator, text)
            self._held, text = text[:begin], text[begin:]
            if self._tag.startswith(text):  # empty, or half of a tag
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
        if call is None or not self._is_call(call, self._held.removesuffix(found)):
            return None, "", self._held + rest
        self._held, self._separator, self.called = "", self._between, True
        return call, rest, None

    def _is_call(self, call: ToolCall, before: str) -> bool:
        """Return whether ``call`` is a call and not an answer in JSON that looks like one."""
        if self._names is None or call.name in self._names:
            return True
        return bool(self._tag) and self._tag in before


def _match_length(separator: re.Pattern[str], text: str) -> int:
    found = separator.match(text)
    return 0 if found is None else found.end()


class JsonObjects:
    """Search for the ends of JSON objects in a text that comes in pieces; each character is read once.

    Text between the objects is skipped.
    """

    def __init__(self) -> None:
        self._object: list[str] = []
        self._depth = 0
        self._quoted = False
        self._escaped = False

    @property
    def inside(self) -> bool:
        """True within an object."""
        return self._depth > 0

    def push(self, text: str) -> tuple[str | None, str]:
        """Return the next object, if this piece completes it (else None), and the unread rest of the piece.

        Its braces are balanced; its content may still be invalid JSON.
        """
        for at, char in enumerate(text):
            if self._depth or char == "{":
                self._object.append(char)
                self._read(char)
                if not self._depth:
                    found = "".join(self._object)
                    self._object.clear()
                    return found, text[at + 1 :]
        return None, ""

    def _read(self, char: str) -> None:
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = False
        elif char == '"':
            self._quoted = True
        elif char in "{}":
            self._depth += 1 if char == "{" else -1


class _Member(NamedTuple):
    value: object
    text: str  # of the value, as it was written


def call_from_json(text: str) -> ToolCall | None:
    """Return the call in a JSON object of ``name`` and ``arguments``, or None if ``text`` is anything else.

    The arguments may be called ``parameters``, whatever the format: models mix the two up. An
    object of a name alone is a call without arguments.
    """
    try:
        members = _members(text)
        name = _text(members.pop("name").value)
        arguments = _arguments(members)
    except (KeyError, ValueError, RecursionError):
        return None
    return ToolCall(name, arguments, new_call_id()) if name else None


def _arguments(members: Mapping[str, _Member]) -> str:
    """Return the arguments object as it was written. Raises KeyError or ValueError if there is none."""
    if not members:
        return "{}"
    given = members["arguments" if "arguments" in members else "parameters"]
    if isinstance(given.value, dict):
        return given.text
    quoted = _text(given.value)  # some models write the object as a string
    if not isinstance(STRICT_JSON.decode(quoted), dict):
        raise ValueError("is not an object")
    return quoted


def _members(text: str) -> dict[str, _Member]:
    """Return the members of a JSON object; of other JSON none. Raises ValueError or RecursionError otherwise.

    The text of a value is cut out: serialised anew, numbers would lose digits, and a repeated name one of its
    values.
    """
    STRICT_JSON.decode(text)  # valid JSON from here on, in which the pattern finds the names of members
    found = {}
    end = 0
    while (name := _NAME_OF_MEMBER.match(text, end)) is not None:
        value, end = STRICT_JSON.raw_decode(text, name.end())
        found[json.loads(name[1])] = _Member(value, text[name.end() : end])
    return found


def _text(value: object) -> str:
    """Return ``value``. Raises ValueError for other JSON and for half of an (escaped) surrogate pair."""
    if not isinstance(value, str):
        raise ValueError("is not a string")
    value.encode("utf-8")
    return value


def new_call_id() -> str:
    """Return nine letters and digits, which Mistral's templates require and all others accept."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


Spell = Callable[[str], str]
"""Maker of the Lark term of a marker: of its text, or of the control token that spells it."""


def quoted(text: str) -> str:
    """Return ``text`` as a Lark literal; a JSON string is one."""
    return json.dumps(text)


def call_rules(tools: Sequence[Tool], head: Callable[[str], str], tail: str) -> list[str]:
    """Return the Lark rules of ``call``: one of the tools, its arguments by its schema between head and tail.

    Args:
        head: the text before the arguments, made from the tool's name as a JSON string.
        tail: the text after them.
    """
    rules = ["call: " + " | ".join(f"call{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        arguments = embedded_schema(tool.arguments_schema)
        name = json.dumps(tool.name, ensure_ascii=False)
        rules.append(f"call{number}: {quoted(head(name))} {arguments} {quoted(tail)}")
    return rules


_NAME: Final = re.compile(r'[^{]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*+")', re.DOTALL)
_ARGUMENTS: Final = re.compile(r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class BegunCall(NamedTuple):
    """Call of which the beginning was written; ``arguments`` is the text from their brace on, if it came."""

    name: str
    arguments: str | None
    id: str = ""  # if the model wrote one


Begin = Callable[[str], BegunCall | None]
"""Reader of the beginning of a call of an offered tool in a text."""


def begun_call(text: str, names: Collection[str]) -> BegunCall | None:
    """Return the call of one of ``names`` that the first object in ``text`` begins, if it does."""
    head = _NAME.match(text)
    if head is None:
        return None
    try:
        name = json.loads(head[1])
    except ValueError:
        return None
    if name not in names:
        return None
    arguments = _ARGUMENTS.match(text, head.end())
    return BegunCall(name, None if arguments is None else text[arguments.end() :])


def is_json_object(text: str) -> bool:
    """Return whether ``text`` is a JSON object."""
    try:
        return isinstance(STRICT_JSON.decode(text), dict)
    except (ValueError, RecursionError):
        return False
