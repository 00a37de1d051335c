"""Shape of a model from its `config.json` or GGUF header alone: no weights are needed to plan for a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diptych.engine.models.config_fields import resolve_config, shape_from_config
from diptych.engine.models.shape import BadModelFile, ModelShape, UnsupportedModel
from diptych.engine.weights.gguf_header import read_header
from diptych.engine.weights.gguf_shape import shape_from_header


class NotPlanned(ValueError):
    """A model whose shape cannot be read. The message says why."""


def read_shape(path: Path) -> ModelShape:
    """Read a GGUF file, a `config.json`, or a folder with one. Raises NotPlanned."""
    try:
        if path.suffix.lower() == ".gguf":
            return shape_from_header(read_header(path), {})[1]
        file = path / "config.json" if path.is_dir() else path
        config = json.loads(file.read_bytes())
        if not isinstance(config, dict):
            raise NotPlanned(f"{file} is not an object")
        if "medusa_num_heads" in config or "draft_vocab_size" in config or _is_eagle(file.parent, config):
            raise NotPlanned(f"{path} holds drafting heads, whose weights and times are not planned")
        resolved = resolve_config(config)
        return shape_from_config(resolved, tied=bool(resolved.get("tie_word_embeddings")))
    except OSError as error:
        raise NotPlanned(f"{error.filename or path} cannot be read: {error.strerror}") from error
    except (UnsupportedModel, BadModelFile) as error:
        raise NotPlanned(f"{path}: {error}") from error
    except ValueError as error:
        if isinstance(error, NotPlanned):
            raise
        raise NotPlanned(f"{path} is neither a GGUF file nor a config.json: {error}") from error


def _is_eagle(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return whether a folder of one layer is an EAGLE head, whose config may be that of a Llama."""
    if config.get("num_hidden_layers") != 1:
        return False
    from diptych.engine.heads.eagle_files import is_eagle  # needs torch

    return is_eagle(folder)
