"""Parts of reading heads' folders that all kinds of heads share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diptych.engine.models.config_fields import resolve_config, shape_from_config
from diptych.engine.models.shape import BadModelFile, ModelShape, UnsupportedModel


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


def layer_shape(path: Path, config: Mapping[str, Any], model: ModelShape) -> ModelShape:
    """Return the shape of a head's layer, as that of a Llama of one, which `config` describes.

    Raises BadHeads for several layers, and for another vocabulary than that of `model`.
    """
    of_llama = {**config, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    try:
        shape = shape_from_config(resolve_config(of_llama), tied=False)
    except (UnsupportedModel, BadModelFile) as error:
        raise BadHeads(f"{path}: {error}") from error
    if shape.num_layers != 1 or shape.vocab_size != model.vocab_size:
        raise BadHeads(
            f"{path}: a head of {shape.num_layers} layers for {shape.vocab_size} tokens; the model has "
            f"{model.vocab_size}, and heads of one layer are computed"
        )
    return shape


def files_digest(path: Path, kind: str) -> str:
    """Return the Sha256 hex of a head's config and of all bytes of its weights, for a head of this kind."""
    digest = hashlib.sha256(f"diptych.{kind}.1".encode())
    for file in (path / "config.json", *sorted(path.glob("*.safetensors"))):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()
