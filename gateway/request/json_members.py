"""The members of one JSON object, each read with the type it must have; what nobody read is refused.

null is the same as absent, as OpenAI's own clients send it. Errors carry the member's path
(``response_format.json_schema.name``) and never its value.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar, cast

from diptych.parameters import UINT32
from diptych.runtime.errors import InvalidParameter, UnsupportedFeature, printable

T = TypeVar("T")


class Members:
    """
    Args:
        members: the object as parsed.
        path: of the object itself; empty for the body.
    """

    def __init__(self, members: dict[str, object], path: str = "") -> None:
        self._members = members
        self._path = path
        self._taken: set[str] = set()

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def take(self, name: str) -> object | None:
        self._taken.add(name)
        return self._members.get(name)

    def string(self, name: str) -> str | None:
        value = self.take(name)
        return None if value is None else string(self.path(name), value)

    def flag(self, name: str) -> bool | None:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidParameter(self.path(name), "must be true or false")
        return value

    def number(self, name: str) -> float | None:
        value = self.take(name)
        return None if value is None else number(self.path(name), value)

    def integer(self, name: str, bounds: tuple[int, int]) -> int | None:
        value = self.take(name)
        return None if value is None else integer(self.path(name), value, bounds)

    def array(self, name: str, at_most: int) -> list[object] | None:
        value = self.take(name)
        return None if value is None else array(self.path(name), value, at_most)

    def nested(self, name: str) -> Members | None:
        value = self.take(name)
        return None if value is None else as_object(self.path(name), value)

    def raw(self, name: str) -> dict[str, object] | None:
        """An object whose members are nobody's business here (a JSON schema)."""
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise InvalidParameter(self.path(name), "must be an object")
        return value

    def one_of(self, name: str, allowed: Collection[str]) -> str | None:
        value = self.string(name)
        if value is not None and value not in allowed:
            raise InvalidParameter(self.path(name), f"must be one of {', '.join(allowed)}")
        return value

    def required(self, name: str, value: T | None) -> T:
        if value is None:
            raise InvalidParameter(self.path(name), "is required")
        return value

    def ignore(self, *names: str) -> None:
        """Members that are accepted and change nothing."""
        self._taken.update(names)

    def only(self, name: str, *harmless: object) -> None:
        """A member that is not implemented; the values that ask for nothing pass."""
        value = self.take(name)
        same = [value == other and type(value) is type(other) for other in harmless]
        if value is not None and not any(same):
            raise UnsupportedFeature(self.path(name))

    def finish(self) -> None:
        """Raises for a member that was not asked for: to ignore it would answer another question."""
        for name, value in self._members.items():
            if name not in self._taken and value is not None:
                raise InvalidParameter(printable(self.path(name)), "is not a field that this server knows")


def string(path: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidParameter(path, "must be a string")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON may escape half of a surrogate pair
            raise InvalidParameter(path, "must be valid Unicode") from error
    return value


def number(path: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParameter(path, "must be a number")
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidParameter(path, "is too large") from error


def integer(path: str, value: object, bounds: tuple[int, int]) -> int:
    """An integer, also one that is written as 16.0: JSON knows one kind of number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(path, "must be an integer")
    lowest, highest = bounds
    if not lowest <= value <= highest:
        raise InvalidParameter(path, f"must be from {lowest} to {highest}")
    return value


def array(path: str, value: object, at_most: int) -> list[object]:
    if not isinstance(value, list):
        raise InvalidParameter(path, "must be an array")
    if len(value) > at_most:
        raise InvalidParameter(path, f"must have at most {at_most} elements")
    return value


def as_object(path: str, value: object) -> Members:
    if not isinstance(value, dict):
        raise InvalidParameter(path, "must be an object")
    return Members(value, path)


def token_ids(path: str, values: Sequence[object]) -> Sequence[int]:
    """Checked in C for lists as they should be; only a wrong one is looked at element by element."""
    if set(map(type, values)) == {int}:
        ids = cast(Sequence[int], values)
        if min(ids) >= UINT32[0] and max(ids) <= UINT32[1]:
            return ids
    return [integer(f"{path}[{index}]", value, UINT32) for index, value in enumerate(values)]
