"""The body of a request: bytes → the members of one JSON object, or `InvalidParameter`.

Strict where Python's parser is not: only UTF-8, no NaN or Infinity, an object on top. What its limits refuse
(nesting beyond the interpreter's stack, integers of thousands of digits) is the client's fault as well.
"""

from __future__ import annotations

import json
from typing import NoReturn

from diptych.runtime.errors import InvalidParameter
from gateway import limits

BODY = "body"
"""What errors call the body as a whole."""


def parse_body(data: bytes) -> dict[str, object]:
    """The top-level members. Raises `InvalidParameter` naming the body."""
    if _too_many(data):
        most = (
            f"{limits.MAX_JSON_COMMAS} commas, {limits.MAX_JSON_NUMBERS} more after digits, and "
            f"{limits.MAX_JSON_COLONS} colons"
        )
        raise InvalidParameter(BODY, f"has too many elements: at most {most} are read, in texts too")
    try:
        found = _DECODER.decode(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidParameter(BODY, "is not UTF-8") from error
    except RecursionError as error:
        raise InvalidParameter(BODY, "is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise InvalidParameter(
            BODY, f"is not valid JSON: wrong at line {error.lineno}, column {error.colno}"
        ) from error
    except ValueError as error:  # an integer with more digits than Python reads, NaN, Infinity
        raise InvalidParameter(BODY, "holds a number that is none or has too many digits") from error
    if not isinstance(found, dict):
        raise InvalidParameter(BODY, "must be a JSON object")
    return found


def _too_many(data: bytes) -> bool:
    if data.count(b":") > limits.MAX_JSON_COLONS:
        return True
    commas = data.count(b",")
    if commas <= limits.MAX_JSON_COMMAS:
        return False
    after_digits = sum(data.count(b"%d," % digit) for digit in range(10))
    return after_digits > limits.MAX_JSON_NUMBERS or commas - after_digits > limits.MAX_JSON_COMMAS


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
