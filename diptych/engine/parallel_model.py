"""Load of the parts of a model that one rank computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed import distributed_c10d as c10d

from diptych.engine.backends.torch.parts_backend import PartsBackend
from diptych.engine.dtype import Precision
from diptych.engine.loaded_model import lower_context
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel import shared_memory_communicator
from diptych.engine.parallel.communicator import Communicator
from diptych.engine.parallel.gloo_communicator import GlooCommunicator
from diptych.engine.parallel.nccl_communicator import NcclCommunicator
from diptych.engine.parallel.parts import Part, deal_parts, parts_of_rank
from diptych.engine.parallel.shared_memory_communicator import SharedMemoryCommunicator
from diptych.engine.parallel.stop_word import StopWord
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.part_weights import cut_of, read_parts, weight_bytes
from diptych.engine.weights.reader import OpenCheckpoint


@dataclass(frozen=True)
class OpenParts:
    """A model's files, opened to be read in parts."""

    opened: OpenCheckpoint
    parts: tuple[Part, ...]

    @property
    def shape(self) -> ModelShape:
        """Shape of the whole model."""
        return self.opened.shape


@dataclass(frozen=True)
class LoadedParts:
    """The parts of one rank, ready to compute."""

    backend: PartsBackend
    weight_bytes: int
    """Bytes of the weights that this rank holds."""


def open_parts(path: Path, precision: Precision, parts: int, max_context: int | None = None) -> OpenParts:
    """Open a model and deal it to `parts`; its shape has `max_context` tokens where that is lower.

    Raises what `load_model` raises, and UnsupportedModel for a model that is not computed in parts: matrices
    that cannot be cut are found here, by the first layer.
    """
    opened = open_checkpoint(path, precision)
    opened = replace(opened, shape=lower_context(opened.shape, max_context))
    dealt = deal_parts(opened.shape, parts)
    for field in ("q", "k", "v", "o", "up", "down"):
        opened.read(f"layers.0.{field}", cut_of(field, dealt[0], opened.shape.head_dim))
    return OpenParts(opened, dealt)


def load_parts(
    model: OpenParts,
    communicator: Communicator,
    stop_word: StopWord,
    threads: int,
    device: torch.device | str = "cpu",
) -> LoadedParts:
    """Read the weights of the parts that `communicator.rank` computes. Raises as `open_parts` does."""
    own = parts_of_rank(len(model.parts), communicator.rank, communicator.ranks)
    weights = read_parts(model.opened, [model.parts[number] for number in own])
    backend = PartsBackend(
        model.shape,
        model.parts,
        weights,
        communicator,
        stop_word=stop_word,
        threads=threads,
        device=device,
    )
    return LoadedParts(backend, weight_bytes(weights))


def join_group(
    rank: int, ranks: int, exchange_fd: int, open_store: Callable[[], c10d.Store], device: torch.device
) -> Communicator:
    """Join a group as `rank`: over the file `exchange_fd` on CPUs that order stores, else over a library.

    Raises GroupBroken, OSError.
    """
    if device.type == "cuda":
        return NcclCommunicator(open_store(), rank, ranks, device)
    if shared_memory_communicator.works_here():
        return SharedMemoryCommunicator(exchange_fd, rank, ranks)
    return GlooCommunicator(open_store(), rank, ranks)
