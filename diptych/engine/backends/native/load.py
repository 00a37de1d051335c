"""Load of a model into the native step: from the packed weights of this host, or from its files."""

from __future__ import annotations

from pathlib import Path

import torch

from diptych.engine.backends.native.backend import NativeBackend, NativeUnavailable
from diptych.engine.backends.native.shared_weights import EmptyFile, MappedWeights, from_store
from diptych.engine.backends.native.supports import supports
from diptych.engine.dtype import Precision, stored_dtype
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights import Storage
from diptych.engine.weights.checkpoint import weight_bytes
from diptych.engine.weights.packed_key import packed_key
from diptych.engine.weights.reader import OpenCheckpoint
from diptych.engine.weights.store import WeightStore
from kernels.cpu import library as native

_STORAGE: dict[Precision, Storage] = {"gguf": "blocks", "int8": "bytes"}
_NATIVE = {"fp32": native.FP32, "bf16": native.BF16, "gguf": native.BLOCKS, "int8": native.BYTES}


def load_native(
    path: Path,
    precision: Precision,
    checkpoint: OpenCheckpoint,
    shape: ModelShape,
    kept: torch.dtype,
    store: WeightStore | None,
) -> NativeBackend:
    """Return a backend of `checkpoint`, the opened `path`, with the context that `shape` says.

    `kept` is the dtype of its keys and values. Nothing is read but the files' heads where `store` has the
    packed weights. Raises NativeUnavailable, and what reading the files raises.
    """
    dtype = stored_dtype(precision)
    if (why := supports(shape)) is not None:
        raise NativeUnavailable(f"the native step does not compute {why}")

    def pack(file: EmptyFile | None) -> NativeBackend:
        return NativeBackend(shape, checkpoint.read_all().weights, dtype, kept=kept, packed=file)

    def take(file: int) -> NativeBackend:
        weights = MappedWeights(file, _STORAGE.get(precision, "dense"))
        return NativeBackend(shape, weights, dtype, kept=kept)

    def key() -> str:
        return packed_key(path, checkpoint.shape, precision, _best_set(precision))

    if store is None:
        return pack(None)
    wanted = key()
    return from_store(store, wanted, weight_bytes(path), take, pack, lambda: key() == wanted)


def _best_set(precision: Precision) -> str:
    """Return the name of the instruction set that computes `precision`. Raises NativeUnavailable."""
    try:
        names = native.instruction_sets(_NATIVE[precision])
    except native.LibraryMissing as error:
        raise NativeUnavailable(str(error)) from error
    if not names:
        raise NativeUnavailable("this machine or build computes no step natively")
    return names[0]
