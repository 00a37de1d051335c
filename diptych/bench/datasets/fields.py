"""Parsers of the fields of a file; their errors name the field."""

from __future__ import annotations

from typing import Any


def whole(value: Any, name: str) -> int:
    """Return a whole number, also from text, as in CSV. Raises ValueError."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name!r} must be a whole number, not {value!r}") from None


def sendable(value: Any, name: str) -> str:
    """Return text that every protocol can carry. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{name!r} must be text, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name!r} has half a surrogate pair at character {error.start}") from None
    return value
