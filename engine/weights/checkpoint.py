"""One way in for all kinds of model files."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.shape import UnsupportedModel
from engine.weights.canonical import Checkpoint


def read_checkpoint(path: Path, dtype: torch.dtype) -> Checkpoint:
    """Read a `.gguf` file or a Hugging Face folder, all tensors in `dtype`.

    Raises FileNotFoundError, UnsupportedModel or BadModelFile.
    """
    if path.is_dir():
        from engine.weights.safetensors_folder import read_folder

        return read_folder(path, dtype)
    if not path.exists():
        raise FileNotFoundError(f"no model at {path}")
    if path.suffix.lower() != ".gguf":
        raise UnsupportedModel(f"{path.name}: a model is a .gguf file or a folder with config.json")
    from engine.weights.gguf_file import read_gguf

    return read_gguf(path, dtype)
