"""Models that a gateway is told to serve: `PATH`, or `NAME=PATH` for each of several, separated by commas."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

from gateway.model.name_rule import NAME_RULE, valid_name

_NAMED: Final = re.compile(r"[\w./:@-]+=")
_NEXT: Final = re.compile(rf",(?={_NAMED.pattern})")  # any other comma is part of a path


class NamedModel(NamedTuple):
    """Model of the command line. ``name`` is None where its files give it."""

    name: str | None
    path: str


def parse_models(text: str) -> tuple[NamedModel, ...]:
    """Return the models of ``--model``. Raises ValueError for what is neither a path nor NAME=PATH.

    The path of a file that is there is one model, whatever signs it has.
    """
    if Path(text).expanduser().exists() or not (_NAMED.match(text) or "," in text):
        return (NamedModel(None, text),)
    found: dict[str, NamedModel] = {}
    for one in _NEXT.split(text):
        name, equals, path = one.partition("=")
        if not equals or not path:
            raise ValueError(f"{one!r} is not there, and not NAME=PATH, which each of several models must be")
        if not valid_name(name):
            raise ValueError(f"the name {name!r} {NAME_RULE}")
        if name in found:
            raise ValueError(f"the name {name!r} is given twice")
        found[name] = NamedModel(name, path)
    return tuple(found.values())
