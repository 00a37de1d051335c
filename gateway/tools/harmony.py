"""Tool calls of gpt-oss: messages to a function, ``<|channel|>commentary to=functions.name …<|message|>{…}``.

The header of a message may name the recipient before or after the channel. A call ends its output, since
``<|call|>`` is an end of sequence. Other messages are text, without their headers; which of them are
reasoning is known before (`gateway.reasoning.harmony`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

from diptych.runtime.grammar.grammar import Grammar, Kind
from gateway.reasoning.harmony import CHANNEL, END, MESSAGE, START
from gateway.tools.headed_calls import headed_call_rules
from gateway.tools.json_calls import BegunCall, JsonObjects, Spell, is_json_object, new_call_id, quoted
from gateway.tools.parser import Parsed
from gateway.tools.tool import Tool, ToolCall

SIGN: Final = CHANNEL
CONSTRAIN: Final = "<|constrain|>"
MARKERS: Final = (START, CHANNEL, CONSTRAIN, MESSAGE, END, "<|call|>", "<|return|>")

_MARKS: Final = re.compile("(" + "|".join(map(re.escape, MARKERS)) + ")")
_RECIPIENT: Final = re.compile(r"\bto=functions\.([^\s<]+)")
_BEGUN: Final = re.compile(r"\bto=functions\.([^\s<]+)[^{]*?<\|message\|>\s*(?=\{)", re.DOTALL)


class HarmonyCallParser:
    """Parser of messages."""

    def __init__(self) -> None:
        self._tail = ""  # that may be the beginning of a mark
        self._header: str | None = None  # so far
        self._name: str | None = None  # of the function that the message is for
        self._held = ""  # the message so far, its header included
        self._objects = JsonObjects()

    def push(self, text: str) -> Parsed:
        text = self._tail + text
        held = _partial_mark(text)
        self._tail, text = text[len(text) - held :], text[: len(text) - held]
        result = Parsed()
        for piece in filter(None, _MARKS.split(text)):
            result += self._push(piece)
        return result

    def finish(self) -> Parsed:
        result = self._push(self._tail) if self._tail else Parsed()
        held, self._tail, self._name, self._header = self._held, "", None, None
        return result + Parsed(held)

    def _push(self, piece: str) -> Parsed:
        """Read a mark, or text without one."""
        if self._header is not None:
            self._header += piece
            if piece == MESSAGE:
                self._begin(self._header)
            return Parsed()
        if piece in (START, CHANNEL):
            result = self._end()
            self._header = piece
            return result
        if piece in MARKERS:
            return self._end() if piece != CONSTRAIN else Parsed()
        return Parsed(piece) if self._name is None else self._argument(piece)

    def _begin(self, header: str) -> None:
        recipient = _RECIPIENT.search(header)
        self._header = None
        self._name = None if recipient is None else recipient[1]
        self._held = "" if recipient is None else header
        self._objects = JsonObjects()

    def _argument(self, text: str) -> Parsed:
        found, rest = self._objects.push(text)
        self._held += text[: len(text) - len(rest)]
        if found is None:
            return Parsed()
        name, self._name = self._name or "", None
        held, self._held = self._held, ""
        if not is_json_object(found):
            return Parsed(held + rest)
        return Parsed(rest if rest.strip() else "", (ToolCall(name, found, new_call_id()),))

    def _end(self) -> Parsed:
        """End a message; one to a function that has no arguments is text."""
        held, self._held, self._name = self._held, "", None
        return Parsed(held)


def _partial_mark(text: str) -> int:
    """Return how many characters at the end of ``text`` may be a mark's beginning."""
    at = text.rfind("<")
    tail = text[at:] if at >= 0 else ""
    return len(tail) if any(mark.startswith(tail) and mark != tail for mark in MARKERS) and tail else 0


def begun_call(text: str, names: Collection[str]) -> BegunCall | None:
    """Return the call of one of ``names`` that a message in ``text`` begins, if it does."""
    begun = _BEGUN.search(text)
    return None if begun is None or begun[1] not in names else BegunCall(begun[1], text[begun.end() :])


def grammar(tools: Sequence[Tool], *, many: bool, spell: Spell = quoted) -> Grammar:
    """Return the grammar of one call, also with ``many``: a call ends the output.

    It begins the output, or follows a message of reasoning.
    """
    rules = headed_call_rules(
        tools,
        lambda name: (
            f"{spell(CHANNEL)} {quoted(f'commentary to=functions.{name} ')} {spell(CONSTRAIN)} "
            f'"json" {spell(MESSAGE)}'
        ),
    )
    start = f'start: ({spell(START)} "assistant")? call'
    return Grammar(Kind.LARK, "\n".join([start, *rules]))
