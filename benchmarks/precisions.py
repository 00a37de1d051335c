"""Models of the engine by the name that `--dtype` gives their precision, for tools that need no server."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from engine.model import Model, load_model
from runtime.settings import DType

PRECISIONS: tuple[DType, ...] = get_args(DType)
"""All that can be computed in; fp32 is what the others are judged by."""


def load_precision(path: Path, name: DType) -> Model:
    """The model as a worker with `--dtype name` computes it. Raises as `load_model` does."""
    return load_model(path, name)
