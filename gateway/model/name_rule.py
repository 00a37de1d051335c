"""Rule for names that operators give to models, adapters and aliases."""

from __future__ import annotations

import re
from typing import Final

MAX_NAME_CHARS: Final = 128
NAME_RULE: Final = (
    f"must be 1 to {MAX_NAME_CHARS} letters, digits and . _ - / : @, and begin with a letter or a digit"
)
_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._/:@-]{{0,{MAX_NAME_CHARS - 1}}}")


def valid_name(name: str) -> bool:
    """Return whether `NAME_RULE` holds."""
    return _NAME.fullmatch(name) is not None
