"""Tool calls in pieces: a call's name and id first, then its arguments as they come.

`CallPieces` wraps the parser of a format and reads the same text. A call begins once the parser holds text
back that names an offered tool and opens its arguments; what the parser finds later ends it. Any other call,
such as one whose arguments come before its name, is a single whole piece.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gateway.tools.json_calls import Begin, JsonObjects, new_call_id
from gateway.tools.parser import TO_AN_END, Parsed, ToolCallParser
from gateway.tools.tool import ToolCall


@dataclass(slots=True)
class _Begun:
    """Call of which pieces were returned."""

    sent: str = field(default="", repr=False)  # of its arguments
    scan: JsonObjects = field(default_factory=JsonObjects)
    closed: bool = False  # the object of its arguments

    def add(self, text: str) -> str:
        """Return the part of the next text that belongs to the arguments."""
        if self.closed:
            return ""
        found, rest = self.scan.push(text)
        self.closed = found is not None
        piece = text[: len(text) - len(rest)]
        self.sent += piece
        return piece

    def extend(self, arguments: str) -> str:
        """Return what ``arguments``, all so far, have more than was sent."""
        piece, self.sent = arguments.removeprefix(self.sent), arguments
        return piece


class CallPieces:
    """Parser whose calls come in pieces.

    Args:
        parser: a new parser of the output's format.
        begin: reads the beginning of a call of an offered tool.
        rewritten: the arguments that ``begin`` returns are not those that the model wrote but made of them;
            they grow where a tag ends.
    """

    def __init__(self, parser: ToolCallParser, begin: Begin, *, rewritten: bool = False) -> None:
        self._parser = parser
        self._begin = begin
        self._rewritten = rewritten
        self._held = ""  # text since the parser last returned something
        self._begun: _Begun | None = None

    def push(self, text: str) -> Parsed:
        result = Parsed()
        # A call then ends with its piece, and the text after it begins another.
        for piece in TO_AN_END.findall(text):
            result += self._push(piece)
        return result

    def finish(self) -> Parsed:
        last = self._parser.finish()
        if self._begun is None:
            return last
        begun, self._begun = self._begun, None
        return Parsed(calls=(_rest(begun, last.calls[0]), *last.calls[1:])) if last.calls else Parsed()

    def _push(self, text: str) -> Parsed:
        found = self._parser.push(text)
        begun = self._begun
        if not found.text and not found.calls:
            return self._hold(text)
        self._held, self._begun = "", None
        if begun is None:
            return found
        if found.calls:
            return replace(found, calls=(_rest(begun, found.calls[0]), *found.calls[1:]))
        return Parsed(calls=(ToolCall("", ""),))  # no call after all: its text was shown as one

    def _hold(self, text: str) -> Parsed:
        """Return the piece of a call that ``text``, held back by the parser, belongs to."""
        if self._begun is not None and not self._rewritten:
            return _further(self._begun.add(text))
        self._held += text
        if self._rewritten and ">" not in text:
            return Parsed()
        begun = self._begin(self._held)
        if begun is None or begun.arguments is None:
            return Parsed()
        if self._begun is not None:
            return _further(self._begun.extend(begun.arguments))
        self._begun = _Begun()
        piece = (self._begun.extend if self._rewritten else self._begun.add)(begun.arguments)
        return Parsed(calls=(ToolCall(begun.name, piece, begun.id or new_call_id(), partial=True),))


def _further(piece: str) -> Parsed:
    return Parsed(calls=(ToolCall("", piece, partial=True),) if piece else ())


def _rest(begun: _Begun, call: ToolCall) -> ToolCall:
    """Return the last piece of a call that is complete: mostly nothing is left of its arguments."""
    arguments = call.arguments_json
    return ToolCall("", arguments.removeprefix(begun.sent) if arguments.startswith(begun.sent) else "")
