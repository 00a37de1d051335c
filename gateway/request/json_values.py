"""JSON of a request: bytes → the members of one object, and single values with the type that they must have.

Strict where Python's parser is not: only UTF-8, no NaN or Infinity, an object on top. What its limits refuse
(nesting beyond the interpreter's stack, integers of thousands of digits) is the client's fault as well.
Errors carry a member's path (``response_format.json_schema.name``) and never its value.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

from diptych.parameters import UINT32
from diptych.runtime.errors import InvalidParameter
from diptych.runtime.strict_json import STRICT_JSON
from gateway import limits

BODY = "body"
"""Name of the body as a whole in errors."""


def parse_body(data: bytes) -> dict[str, object]:
    """Return the top-level members. Raises InvalidParameter naming the body."""
    if _has_too_many_elements(data):
        most = (
            f"{limits.MAX_JSON_COMMAS} commas, {limits.MAX_JSON_NUMBERS} more after digits, and "
            f"{limits.MAX_JSON_COLONS} colons"
        )
        raise InvalidParameter(BODY, f"has too many elements: at most {most} are read, in texts too")
    try:
        found = STRICT_JSON.decode(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidParameter(BODY, "is not UTF-8") from error
    except RecursionError as error:
        raise InvalidParameter(BODY, "is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise InvalidParameter(
            BODY, f"is not valid JSON: wrong at line {error.lineno}, column {error.colno}"
        ) from error
    except ValueError as error:  # an integer with more digits than Python reads, NaN, Infinity
        raise InvalidParameter(BODY, "holds NaN, Infinity or a number of too many digits") from error
    if not isinstance(found, dict):
        raise InvalidParameter(BODY, "must be a JSON object")
    return found


def _has_too_many_elements(data: bytes) -> bool:
    if data.count(b":") > limits.MAX_JSON_COLONS:
        return True
    commas = data.count(b",")
    if commas <= limits.MAX_JSON_COMMAS:
        return False
    after_digits = sum(data.count(b"%d," % digit) for digit in range(10))
    return after_digits > limits.MAX_JSON_NUMBERS or commas - after_digits > limits.MAX_JSON_COMMAS


def string(path: str, value: object) -> str:
    """Return a string that protobuf can hold. Raises InvalidParameter."""
    if not isinstance(value, str):
        raise InvalidParameter(path, "must be a string")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON may escape half of a surrogate pair
            raise InvalidParameter(path, "must be valid Unicode") from error
    return value


def number(path: str, value: object) -> float:
    """Return a number that is no truth value. Raises InvalidParameter."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParameter(path, "must be a number")
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidParameter(path, "is too large") from error


def integer(path: str, value: object, bounds: tuple[int, int]) -> int:
    """Return an integer, also one that is written as 16.0: JSON knows one kind of number.

    Raises InvalidParameter.
    """
    value = whole(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(path, "must be an integer")
    lowest, highest = bounds
    if not lowest <= value <= highest:
        raise InvalidParameter(path, f"must be from {lowest} to {highest}")
    return value


def whole(value: object) -> object:
    """Return a float without a fraction as the integer that it is, anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def array(path: str, value: object, at_most: int) -> list[object]:
    """Return a list of bounded length. Raises InvalidParameter."""
    if not isinstance(value, list):
        raise InvalidParameter(path, "must be an array")
    if len(value) > at_most:
        raise InvalidParameter(path, f"must have at most {at_most} elements")
    return value


def members(path: str, value: object) -> dict[str, object]:
    """Return the members of an object. Raises InvalidParameter."""
    if not isinstance(value, dict):
        raise InvalidParameter(path, "must be an object")
    return value


def token_ids(path: str, values: Sequence[object]) -> Sequence[int]:
    """Return the ids, checked in C where all are good; only a bad list is looked at element by element."""
    if set(map(type, values)) == {int}:
        ids = cast(Sequence[int], values)
        if min(ids) >= UINT32[0] and max(ids) <= UINT32[1]:
            return ids
    return [integer(f"{path}[{index}]", value, UINT32) for index, value in enumerate(values)]
