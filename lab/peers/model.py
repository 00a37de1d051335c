"""Model that all servers of the comparison serve."""

from __future__ import annotations

from pathlib import Path

from diptych.runtime.settings import resolve_model


def find_model(name: str) -> Path:
    """Find a GGUF file, by path or as "bundled". Raises FileNotFoundError."""
    path = resolve_model(name)
    if path.suffix != ".gguf":
        raise FileNotFoundError(f"{path}: llama.cpp's types are made from a GGUF file")
    return path
