"""A loaded model: its shape, its stop tokens and the backend that computes it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from engine.backend import Backend
from engine.kv_memory import KVLayout
from engine.precision import PLAIN, Precision, stored_dtype
from engine.shape import ModelShape, UnsupportedModel
from engine.torch_backend import TorchBackend
from engine.weights import Weights
from engine.weights.checkpoint import read_checkpoint

_LOG = logging.getLogger(__name__)

BackendChoice = Literal["auto", "torch", "native"]


@dataclass(frozen=True)
class Model:
    """A model that is ready to compute."""

    shape: ModelShape
    precision: Precision
    dtype: torch.dtype
    """Of keys and values."""
    eos_token_ids: tuple[int, ...]
    backend: Backend
    backend_name: Literal["torch", "native"]

    def kv_layout(self, block_size: int) -> KVLayout:
        """How blocks of `block_size` tokens of this model look."""
        shape = self.shape
        return KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, block_size, self.dtype)


def native_step_works() -> bool:
    """Whether this installation has the native step."""
    from kernels.cpu import library

    try:
        library.load()
    except library.LibraryMissing:
        return False
    return True


def load_model(path: Path, precision: Precision | torch.dtype, *, backend: BackendChoice = "auto") -> Model:
    """Load a GGUF file or a Hugging Face folder with safetensors.

    A torch dtype means the precision that stores everything in it.

    `auto` takes the native backend where it can run this model on this machine, else torch. Raises
    FileNotFoundError, UnsupportedModel (the message names what is not supported), BadModelFile for a broken
    file, and NativeUnavailable if `native` was asked for and cannot be had.
    """
    chosen = _precision(precision)
    checkpoint = read_checkpoint(path, chosen)
    dtype = stored_dtype(chosen)
    made, name = _make_backend(checkpoint.shape, checkpoint.weights, dtype, backend)
    return Model(checkpoint.shape, chosen, dtype, checkpoint.eos_token_ids, made, name)


def _precision(asked: Precision | torch.dtype) -> Precision:
    if not isinstance(asked, torch.dtype):
        return asked
    for precision, dtype in PLAIN.items():
        if dtype == asked:
            return precision
    raise UnsupportedModel(f"dtype {asked}: only float32 and bfloat16 are computed")


def _make_backend(
    shape: ModelShape, weights: Weights, dtype: torch.dtype, choice: BackendChoice
) -> tuple[Backend, Literal["torch", "native"]]:
    if choice != "torch":
        # Imported here: it may compile C++ at import or first use, which the torch backend does not need.
        from engine.native_backend import NativeBackend, NativeUnavailable

        try:
            return NativeBackend(shape, weights, dtype), "native"
        except NativeUnavailable as error:
            if choice == "native":
                raise
            _LOG.info("no native backend, torch computes: %s", error)
    return TorchBackend(shape, weights), "torch"
