"""Parts of reading heads' folders that all kinds of heads share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class BadHeads(ValueError):
    """Files that are no heads of the model; the message says what is wrong."""


def read_config(path: Path) -> dict[str, Any]:
    """Return the fields of a folder's config.json. Raises BadHeads."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise BadHeads(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise BadHeads(f"{file} holds no JSON object")
    return config
