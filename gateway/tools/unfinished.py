"""Call that an output ends within: cut by its length, a stop string or a limit on its time.

Such a call comes back as the fragment that was written, if its name is known, and never as text with the
markup of its format.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gateway.tools.json_calls import Begin, JsonObjects, new_call_id
from gateway.tools.parser import Parsed
from gateway.tools.tool import ToolCall


@dataclass(frozen=True, slots=True)
class UnfinishedCalls:
    """Reader of the text that a parser holds back at the end of an output.

    Attributes:
        begin: reads the beginning of a call of a tool that may be called.
        markers: of the format.
        forced: the output is calls only, so that none of its text is an answer.
    """

    begin: Begin
    markers: Collection[str]
    forced: bool

    def read(self, held: str, *, cut: bool) -> Parsed:
        """Return the fragment of a call in the last text, nothing for other markup, else the text.

        Args:
            held: what no call came of.
            cut: the output did not end by itself.
        """
        if not (self.forced or cut):
            return Parsed(held)
        fragment = self._fragment(held)
        if fragment is not None:
            return Parsed(calls=(fragment,))
        return Parsed("" if self.forced or any(marker in held for marker in self.markers) else held)

    def _fragment(self, held: str) -> ToolCall | None:
        begun = self.begin(held)
        if begun is None:
            return None
        arguments = begun.arguments or ""
        _, rest = JsonObjects().push(arguments)
        return ToolCall(
            begun.name, arguments[: len(arguments) - len(rest)], begun.id or new_call_id(), partial=True
        )
