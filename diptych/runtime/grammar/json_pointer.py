"""References within one JSON schema (RFC 6901, as the fragment of a URI)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_INDEX: Final = re.compile("0|[1-9][0-9]{0,8}")


def referenced_part(root: Mapping[str, object], reference: object) -> object:
    """Return the part of ``root`` that ``reference`` points to; None if it points to none, or outside."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: object = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(name)
        elif isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found
