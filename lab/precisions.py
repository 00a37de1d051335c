"""Models of the engine by the name that `--dtype` gives their precision, for tools that need no server."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader

from diptych.engine.dtype import ON_CPU, KVCacheDtype, Precision
from diptych.engine.loaded_model import Model, load_model

PRECISIONS: tuple[Precision, ...] = ON_CPU
"""Precisions that a CPU computes in; fp32 is what the others are judged by."""


def load_precision(path: Path, name: Precision) -> Model:
    """Load the model as a worker with `--dtype name` computes it. Raises as `load_model` does."""
    return load_model(path, name)


def load_kept(path: Path, kept: KVCacheDtype) -> Model:
    """Load the model in fp32 with keys and values in `kept`, in torch where the native step has them not."""
    return load_model(path, "fp32", backend="torch" if kept == "fp8" else "auto", kv_cache=kept)


def matrix_bytes(path: Path, name: str) -> int | None:
    """Bytes of the matrices that a step reads where they lie as in the file; None where they are converted.

    The embedding counts when it is the head, too; else a step reads some rows of it only.
    """
    if name != "gguf":
        return None
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    head = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    layers = [
        tensor for tensor in tensors.values() if tensor.name.startswith("blk.") and len(tensor.shape) == 2
    ]
    return sum(int(tensor.n_bytes) for tensor in (*layers, tensors[head]))
