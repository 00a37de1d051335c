"""Reader of a Hugging Face folder's `config.json`; diptych/engine/models/config_fields.py has its fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diptych.engine.models.config_fields import resolve_config, shape_from_config, unreadable

__all__ = ["read_config", "resolve_config", "shape_from_config"]


def read_config(folder: Path) -> dict[str, Any]:
    """Return the fields of the folder's `config.json`, defaults filled in; of a wrapper, its text model's.

    Raises FileNotFoundError, and UnsupportedModel, naming the field, for no config of a known family.
    """
    path = folder / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"no config.json in {folder}")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise unreadable(str(error)) from error
    if not isinstance(config, dict):
        raise unreadable("it is not an object")
    return resolve_config(config)
