"""Finds where JSON objects end in a text that comes in pieces."""

from __future__ import annotations


class JsonObjects:
    """Looks at each character once. What stands between the objects is passed over."""

    def __init__(self) -> None:
        self._object: list[str] = []
        self._depth = 0
        self._quoted = False
        self._escaped = False

    @property
    def inside(self) -> bool:
        """Whether an object is open."""
        return self._depth > 0

    def push(self, text: str) -> tuple[str | None, str]:
        """The next object, if this piece completes it, and the rest of the piece, which nobody looked at.

        Its braces are balanced; whether it is JSON inside is not said.
        """
        for at, char in enumerate(text):
            if self._depth or char == "{":
                self._object.append(char)
                self._take(char)
                if not self._depth:
                    found = "".join(self._object)
                    self._object.clear()
                    return found, text[at + 1 :]
        return None, ""

    def _take(self, char: str) -> None:
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
