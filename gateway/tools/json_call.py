"""A call as one JSON object of a name and arguments, which is how all forms write it."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping
from typing import Final, NamedTuple, NoReturn

from gateway.tools.tool import ToolCall

_ALPHABET: Final = string.ascii_letters + string.digits
_NAME_OF_MEMBER: Final = re.compile(r'[\s{,]*("(?:[^"\\]|\\.)*")\s*:\s*')


class _Member(NamedTuple):
    value: object
    text: str  # of the value, as it was written


def call_from_json(text: str) -> ToolCall | None:
    """The call in a JSON object of ``name`` and ``arguments``, or None if that is not what it is.

    The arguments may be called ``parameters``, whatever the form: models mix the two up. Without either it is
    a call if the name is all there is.
    """
    try:
        members = _members(text)
        name = _text(members.pop("name").value)
        arguments = _arguments(members)
    except (KeyError, ValueError, RecursionError):
        return None
    return ToolCall(name, arguments, _new_id()) if name else None


def _arguments(members: Mapping[str, _Member]) -> str:
    """An object, as it was written. Raises what `call_from_json` catches if the members hold none."""
    if not members:
        return "{}"
    given = members["arguments" if "arguments" in members else "parameters"]
    if isinstance(given.value, dict):
        return given.text
    quoted = _text(given.value)  # as some models do
    if not isinstance(_DECODER.decode(quoted), dict):
        raise ValueError("is not an object")
    return quoted


def _members(text: str) -> dict[str, _Member]:
    """Those of a JSON object; of other JSON none. Raises ValueError or RecursionError for what is no JSON.

    The text of a value is cut out: written anew, numbers would lose digits, and a name given twice one of its
    values.
    """
    _DECODER.decode(text)  # from here on it is known to be JSON, of which the pattern finds the right places
    found = {}
    end = 0
    while (name := _NAME_OF_MEMBER.match(text, end)) is not None:
        value, end = _DECODER.raw_decode(text, name.end())
        found[json.loads(name[1])] = _Member(value, text[name.end() : end])
    return found


def _text(value: object) -> str:
    """Raises ValueError for what is none: other JSON, or half of a surrogate pair, which JSON may escape."""
    if not isinstance(value, str):
        raise ValueError("is not a string")
    value.encode("utf-8")
    return value


def _new_id() -> str:
    """Nine letters and digits: what Mistral's templates insist on, and all others take."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)
