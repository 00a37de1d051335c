"""JSON as its standard has it (RFC 8259): Python's parser takes NaN and Infinity, too."""

from __future__ import annotations

import json
from typing import Final, NoReturn


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


STRICT_JSON: Final = json.JSONDecoder(parse_constant=_refuse_constant)
"""Decoder that raises ValueError for NaN and Infinity, as for all else that is wrong."""
