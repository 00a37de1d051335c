"""Context length of a model, prompt and output together, from its files and `--max-model-len`.

YaRN stretches the length that a model was trained on by its factor, and many files give the trained length
alone as their context: the product is served, as peers do. The engine derives the same from its own reading
of the files (`RopeScaling.stretched_context`, diptych/engine/models/shape.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diptych.model_families import WRAPPERS
from diptych.runtime.gguf_split import first_part
from diptych.runtime.settings import StartupError
from diptych.runtime.tokenizer.gguf_metadata import MalformedGguf, read_scalars


class ContextTooLong(StartupError, ValueError):
    """More context than the model can read was asked for."""


def limited_context(limit: int, chosen: int | None) -> int:
    """Return the context to serve of a model that reads `limit` tokens. Raises ContextTooLong."""
    if chosen is not None and chosen > limit:
        raise ContextTooLong(
            f"--max-model-len {chosen}: the model's files say that it reads {limit} tokens at most, "
            "prompt and output together"
        )
    return limit if chosen is None else chosen


def check_max_model_len(path: Path, chosen: int | None) -> None:
    """Raise ContextTooLong if the files at `path` say that the model reads fewer than `chosen` tokens."""
    if chosen is not None and (limit := _context_of(path)) is not None:
        limited_context(limit, chosen)


def folder_context(config: Mapping[str, Any]) -> int | None:
    """Return the tokens that a config.json gives; None if it gives none."""
    key = WRAPPERS.get(str(config.get("model_type")))
    if key is not None and isinstance(inner := config.get(key), dict):
        config = inner
    declared = _positive(config.get("max_position_embeddings"))
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if declared is None or not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "yarn":
        return declared
    beside, within = (one.get("original_max_position_embeddings") for one in (config, rope))
    return _stretched(declared, beside or within or declared, rope.get("factor"))


def gguf_context(metadata: Mapping[str, Any]) -> int | None:
    """Return the tokens that a GGUF file's metadata gives; None if it gives none."""
    family = metadata.get("general.architecture")
    declared = _positive(metadata.get(f"{family}.context_length"))
    scaling = f"{family}.rope.scaling"
    if declared is None or metadata.get(f"{scaling}.type") != "yarn":
        return declared
    original, factor = metadata.get(f"{scaling}.original_context_length"), metadata.get(f"{scaling}.factor")
    return _stretched(declared, original, factor)


def _context_of(path: Path) -> int | None:
    try:
        if path.is_dir():
            return folder_context(json.loads((path / "config.json").read_bytes()))
        return gguf_context(read_scalars(first_part(path)))
    except (OSError, ValueError, MalformedGguf):
        return None  # the programs that load the model say why


def _stretched(declared: int, original: object, factor: object) -> int:
    """Return the product; files whose numbers are none are refused by the engine, by name."""
    trained = _positive(original)
    if trained is None or isinstance(factor, bool) or not isinstance(factor, int | float):
        return declared
    return max(declared, int(trained * factor)) if math.isfinite(factor) else declared


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
