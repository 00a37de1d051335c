"""Parsers of flags' values, whose errors say what is wrong with a value."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from diptych.bench.datasets.token_source import MOST_TOKENS
from diptych.bench.load import INFINITE

T = TypeVar("T")


def list_of(one: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a parser of values with commas between."""

    def parse(text: str) -> list[T]:
        return [one(part) for part in text.split(",")]

    return parse


def count(text: str) -> int:
    return _at_least(1, text)


def natural(text: str) -> int:
    return _at_least(0, text)


def positive(text: str) -> float:
    value = _number(text)
    if value is None or not 0 < value < INFINITE:
        raise ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def from_zero(text: str) -> float:
    value = _number(text)
    if value is None or not 0 <= value < INFINITE:
        raise ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def rate(text: str) -> float | None:
    """Parse requests a second; None replays a trace at its own times."""
    if text == "trace":
        return None
    if text == "inf":
        return INFINITE
    try:
        return positive(text)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}, inf or trace") from None


def share(text: str) -> float:
    value = _number(text)
    if value is None or not 0 <= value < 1:
        raise ArgumentTypeError(f"{text!r} is not in [0, 1)")
    return value


def token_span(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high) < MOST_TOKENS):
        raise ArgumentTypeError(f"{text!r} is not LOW:HIGH, of token ids")
    return int(low), int(high)


def address(text: str) -> str:
    if text.startswith(("http://", "https://")):
        raise ArgumentTypeError(f"{text!r} is not HOST:PORT without http://; a URL goes to --base-url")
    return text


def url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ArgumentTypeError(f"{text!r} needs http:// or https:// in front")
    try:
        parts = urlsplit(text)
        named = bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r}: {error}") from None
    if not named:
        raise ArgumentTypeError(f"{text!r} names no host")
    return text


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ArgumentTypeError("not a JSON object")
    return value


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise ArgumentTypeError(f"{text} is less than {least}")
    return value


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
