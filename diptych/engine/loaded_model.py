"""A loaded model: its shape and the backend that computes it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from diptych.engine.backend import Backend
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.dtype import (
    ON_CPU,
    ON_GPU,
    ON_GPU_QUANTISED,
    KVCacheDtype,
    Precision,
    kept_dtype,
    kept_scales,
    plain_precision,
)
from diptych.engine.gpu_precision import describe_matrices
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.kv.model_layout import kv_layout
from diptych.engine.models.shape import ModelShape, UnsupportedModel
from diptych.engine.weights import Weights
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.reader import OpenCheckpoint
from diptych.engine.weights.store import WeightStore

_LOG = logging.getLogger(__name__)

BackendChoice = Literal["auto", "torch", "native", "triton"]
_CPU = torch.device("cpu")
_TORCH_ROUNDS = "torch picks its kernels, and so the order of sums, by the number of rows"
BackendName = Literal["torch", "torch-parts", "native", "native-parts", "triton", "triton-parts"]


@dataclass(frozen=True)
class Model:
    """A model that is ready to compute."""

    shape: ModelShape
    precision: Precision
    dtype: torch.dtype
    """Type of keys and values."""
    backend: Backend
    backend_name: BackendName
    device: torch.device = _CPU
    why_torch: str | None = None
    """Reason, in words, why torch computes; None where another backend does, or torch was asked for."""
    matrices: str = ""
    """Numbers in which quantised matrices are multiplied on a GPU, in words."""
    make_memory: Callable[[KVLayout, int], KVMemory] | None = None
    """Makes the blocks of this process' own where other processes compute in them, too."""
    own_order: bool = False
    """True where the batch-invariant step computes in place of one whose sums have another order."""

    @property
    def computes(self) -> str:
        """Precision, the numbers of quantised matrices and the order of sums, in words."""
        words = [self.matrices] * bool(self.matrices) + ["batch-invariant"] * self.own_order
        return f"{self.precision} ({', '.join(words)})" if words else self.precision

    def kv_layout(self, block_size: int) -> KVLayout:
        """Return the layout of blocks of `block_size` tokens of this model."""
        return kv_layout(self.shape, self.dtype, block_size)

    def kv_memory(self, layout: KVLayout, num_blocks: int) -> KVMemory:
        """Blocks of this process' own, where this model computes."""
        if self.make_memory is not None:
            return self.make_memory(layout, num_blocks)
        if self.device.type == "cpu":
            return KVMemory(layout, num_blocks)
        return KVMemory.on_device(layout, num_blocks, self.device)


def native_step_works() -> bool:
    """Return whether this installation has the native step."""
    from kernels.cpu import library

    try:
        library.load()
    except library.LibraryMissing:
        return False
    return True


def load_model(
    path: Path,
    precision: Precision | torch.dtype,
    *,
    backend: BackendChoice = "auto",
    device: torch.device | str = "cpu",
    kv_cache: KVCacheDtype = "auto",
    max_context: int | None = None,
    store: WeightStore | None = None,
    batch_invariant: bool = False,
) -> Model:
    """Load a GGUF file or a Hugging Face folder with safetensors.

    A torch dtype means the precision that stores everything in it.

    On a CPU, `auto` takes the native backend where it can run this model on this machine, else torch; on a
    GPU it takes triton where that computes the model's shape, else torch. `kv_cache` says in what numbers
    keys and values are kept; `max_context` lowers the context to so many tokens, for all that is sized by
    it. What the native step packs lies once for all processes with the same `store`. With `batch_invariant`
    a token has the same bits in a step of any size: the native step computes so anyway.

    Raises FileNotFoundError, UnsupportedModel (the message names what is not supported, torch for one where
    bits are not to depend on the batch), BadModelFile for a
    broken file, and NativeUnavailable or TritonUnavailable if the backend that was asked for cannot be had.
    """
    chosen = plain_precision(precision) if isinstance(precision, torch.dtype) else precision
    where = torch.device(device)
    _check_choice(chosen, backend, where)
    _check_kv_cache(kv_cache, backend, where)
    if batch_invariant and backend == "torch":
        raise UnsupportedModel(f"--batch-invariant: {_TORCH_ROUNDS}")
    checkpoint = open_checkpoint(path, chosen)
    dtype = kept_dtype(kv_cache, chosen)
    shape = lower_context(checkpoint.shape, max_context)
    if kv_cache != "auto" and shape.latent is not None:
        raise UnsupportedModel(f"kv-cache-dtype {kv_cache}: latents are kept in the computation's own dtype")
    scales = kept_scales(kv_cache, shape, checkpoint.kv_scales)
    if backend == "triton" or where.type == "cuda":
        weights = checkpoint.read_all().weights
        made, name, where, why = _make_on_gpu(
            shape, weights, chosen, where, scales, batch_invariant=batch_invariant
        )
        computed = describe_matrices(weights, where) if chosen in ON_GPU_QUANTISED else ""
        return Model(
            shape, chosen, dtype, made, name, where, why, matrices=computed, own_order=batch_invariant
        )
    if backend == "torch":
        made, name, why = TorchBackend(shape, checkpoint.read_all().weights, scales), "torch", None
    else:
        native_only = backend == "native" or batch_invariant
        made, name, why = _make_on_cpu(path, chosen, checkpoint, shape, dtype, native_only, store)
    return Model(shape, chosen, dtype, made, name, where, why)


def lower_context(shape: ModelShape, tokens: int | None) -> ModelShape:
    """Return `shape` with a context of `tokens`, if any. Raises UnsupportedModel if the model reads fewer."""
    if tokens is None:
        return shape
    if tokens > shape.max_context:
        raise UnsupportedModel(f"a context of {tokens} tokens: the model reads {shape.max_context}")
    return replace(shape, max_context=tokens)


def _check_choice(precision: Precision, backend: BackendChoice, device: torch.device) -> None:
    """Raises UnsupportedModel for what does not go together, before gigabytes are read."""
    if device.type == "cuda" and backend not in ("auto", "triton"):
        raise UnsupportedModel(f"backend {backend} computes on the CPU, not on {device}")
    on_gpu = device.type == "cuda" or backend == "triton"
    if precision not in (ON_GPU if on_gpu else ON_CPU):
        known = ", ".join(ON_GPU if on_gpu else ON_CPU)
        raise UnsupportedModel(f"dtype {precision} is not computed on {device.type}; {known} are")


def _check_kv_cache(kv_cache: KVCacheDtype, backend: BackendChoice, device: torch.device) -> None:
    """Raises UnsupportedModel where keys and values are not kept so."""
    if kv_cache == "fp8" and device.type == "cpu" and backend in ("auto", "native"):
        raise UnsupportedModel(
            "kv-cache-dtype fp8: the native CPU step keeps keys and values in the computation's own dtype "
            "or in int8; a GPU keeps them in fp8, and so does backend torch, slowly"
        )
    if kv_cache == "int8" and (device.type == "cuda" or backend == "triton"):
        raise UnsupportedModel(
            "kv-cache-dtype int8: a GPU keeps keys and values in the computation's own dtype or in fp8; the "
            "native CPU step keeps them in int8"
        )


def _make_on_gpu(
    shape: ModelShape,
    weights: Weights,
    precision: Precision,
    device: torch.device,
    kv_scales: torch.Tensor | None,
    *,
    batch_invariant: bool,
) -> tuple[Backend, BackendName, torch.device, str | None]:
    """Return a backend, its name, the device on which it computes, and why it is torch where it is."""
    # Imported here: Triton is not installed everywhere.
    from diptych.engine.backends.triton.backend import TritonBackend
    from diptych.engine.backends.triton.supports import supports

    if (why := supports(shape)) is not None:
        why = f"the Triton step does not compute {why}"
        if precision in ON_GPU_QUANTISED:
            raise UnsupportedModel(f"dtype {precision}: {why}")
        if batch_invariant:
            raise UnsupportedModel(f"--batch-invariant: {why}, and {_TORCH_ROUNDS}")
        _LOG.warning("torch computes, which is slower: %s", why)
        return TorchBackend(shape, weights, kv_scales, device), "torch", device, why
    made = TritonBackend(shape, weights, device, kv_scales=kv_scales, batch_invariant=batch_invariant)
    return made, "triton", made.device, None


def _make_on_cpu(
    path: Path,
    precision: Precision,
    checkpoint: OpenCheckpoint,
    shape: ModelShape,
    kept: torch.dtype,
    native_only: bool,
    store: WeightStore | None,
) -> tuple[Backend, BackendName, str | None]:
    """Return a backend, its name, and why it is torch where the native one was asked for."""
    # Imported here: it loads the native library, which the torch backend does not need.
    from diptych.engine.backends.native.backend import NativeUnavailable
    from diptych.engine.backends.native.load import load_native

    try:
        return load_native(path, precision, checkpoint, shape, kept, store), "native", None
    except NativeUnavailable as error:
        if native_only:
            raise
        why = str(error)
        _LOG.warning("no native backend, torch computes, which is slower: %s", why)
    return TorchBackend(shape, checkpoint.read_all().weights), "torch", why
