"""Load of the parts of a model that one rank computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch.distributed import distributed_c10d as c10d

from diptych.engine.backends.torch.parts_backend import PartsBackend
from diptych.engine.dtype import (
    IN_PARTS,
    ON_GPU,
    ON_GPU_QUANTISED,
    KVCacheDtype,
    Precision,
    kept_scales,
    stored_dtype,
)
from diptych.engine.loaded_model import lower_context
from diptych.engine.models.shape import ModelShape, UnsupportedModel
from diptych.engine.parallel import shared_memory_communicator
from diptych.engine.parallel.cards import Exchange, agree_on_exchange
from diptych.engine.parallel.communicator import Communicator
from diptych.engine.parallel.gloo_communicator import LOOPBACK, GlooCommunicator
from diptych.engine.parallel.host_copies import HostCopies
from diptych.engine.parallel.kv_shares import KVShare
from diptych.engine.parallel.nccl_communicator import NcclCommunicator
from diptych.engine.parallel.parts import CUT_UNIT, Part, deal_parts, parts_of_rank
from diptych.engine.parallel.peer_memory_communicator import over_peer_memory
from diptych.engine.parallel.pipeline import Links
from diptych.engine.parallel.shared_memory_communicator import SharedMemoryCommunicator
from diptych.engine.parallel.stages import Grid, Stage, deal_stages
from diptych.engine.parallel.stop_word import StopWord
from diptych.engine.parallel.ways import Way, links_of, own_ways
from diptych.engine.weights import Weights
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.part_weights import read_parts, weight_bytes
from diptych.engine.weights.reader import OpenCheckpoint

if TYPE_CHECKING:
    from diptych.engine.backends.native.parts_backend import NativePartsBackend
    from diptych.engine.backends.triton.parts_backend import TritonPartsBackend


@dataclass(frozen=True)
class OpenParts:
    """A model's files, opened to be read in parts."""

    opened: OpenCheckpoint
    parts: tuple[Part, ...]
    stages: tuple[Stage, ...]

    @property
    def shape(self) -> ModelShape:
        """Shape of the whole model."""
        return self.opened.shape


@dataclass(frozen=True)
class LoadedParts:
    """The parts of one rank, ready to compute."""

    backend: PartsBackend | NativePartsBackend | TritonPartsBackend
    weight_bytes: int
    """Bytes of the weights that this rank holds."""
    name: Literal["torch-parts", "native-parts", "triton-parts"] = "torch-parts"


@dataclass(frozen=True)
class Dealing:
    """Shares that a model is dealt to, the same for all processes of a group."""

    parts: int
    """Parts in which products are added."""
    stages: int = 1
    whole_experts: bool = False
    """Parts have whole experts, in place of a share of each."""
    all_to_all: bool = False
    """Rows are sent to their experts, in place of sums to all rows."""


def open_parts(
    path: Path, precision: Precision, dealing: Dealing, max_context: int | None = None
) -> OpenParts:
    """Open a model and deal it; its shape has `max_context` tokens where that is lower.

    Raises what `load_model` raises, and UnsupportedModel for a model that cannot be dealt so.
    """
    if precision not in IN_PARTS:
        raise UnsupportedModel(f"dtype {precision} is not computed in parts: {', '.join(IN_PARTS)} are")
    opened = open_checkpoint(path, precision)
    opened = replace(opened, shape=lower_context(opened.shape, max_context))
    if opened.shape.recurrent_layers:
        raise UnsupportedModel(f"the recurrent layers of {opened.shape.family} are not dealt to parts")
    # All that it depends on is in the handshake: the model, the precision and the number of parts.
    unit = CUT_UNIT if precision in ON_GPU_QUANTISED else 1
    parts = deal_parts(
        opened.shape,
        dealing.parts,
        whole_experts=dealing.whole_experts,
        all_to_all=dealing.all_to_all,
        unit=unit,
    )
    return OpenParts(opened, parts, deal_stages(opened.shape, dealing.stages))


def why_not_native(shape: ModelShape, precision: Precision, dealing: Dealing = Dealing(1)) -> str | None:
    """Return None if the native step computes a model in parts, here, or else why not, in words."""
    # Imported here: it loads the native library, which the torch backend does not need.
    from diptych.engine.backends.native.supports import supports_in_parts
    from kernels.cpu import library

    if dealing.all_to_all:
        return "the native step sends no rows to experts of other ranks"
    if precision not in _NATIVE:
        return f"the native step does not compute {precision} in parts"
    if (why := supports_in_parts(shape)) is not None:
        return f"the native step does not compute {why} in parts"
    try:
        library.load()
    except library.LibraryMissing as error:
        return str(error)
    return None


_NATIVE: tuple[Precision, ...] = ("fp32", "bf16", "int8")


def load_native_parts(
    model: OpenParts, precision: Precision, links: Links, sums: int, threads: int, stage: int = 0
) -> LoadedParts:
    """Read the weights that `links.ranks.rank` computes in a stage, for the native step. `sums` is the
    descriptor of an empty file in memory, one for all ranks of the stage, or -1 where there is one.

    Raises as `open_parts` does, and NativeUnavailable.
    """
    from diptych.engine.backends.native.parts_backend import NativePartsBackend
    from diptych.engine.backends.native.share import Share

    rank, ranks = links.ranks.rank, links.ranks.ranks
    parts, weights = _read_own(model, links, stage)
    share = Share(model.shape, parts, weights, rank, ranks, model.stages[stage], sums)
    backend = NativePartsBackend(share, stored_dtype(precision), links, threads=threads)
    return LoadedParts(backend, weight_bytes(weights), "native-parts")


def _read_own(model: OpenParts, links: Links, stage: int) -> tuple[list[Part], tuple[Weights, ...]]:
    """Return the parts of a rank, and the weights that they have in the layers of a stage."""
    numbers = parts_of_rank(len(model.parts), links.ranks.rank, links.ranks.ranks)
    own = [model.parts[number] for number in numbers]
    return own, read_parts(model.opened, own, model.stages[stage])


def load_parts(
    model: OpenParts,
    links: Links,
    stop_word: StopWord,
    threads: int,
    device: torch.device | str = "cpu",
    stage: int = 0,
    held: KVShare | None = None,
    *,
    triton: bool = False,
    kv_cache: KVCacheDtype = "auto",
) -> LoadedParts:
    """Read the weights that `links.ranks.rank` computes in a stage, for the Triton step, or for torch.

    Args:
        held: share of each block that a memory of this process holds; None: all of it.
        triton: whether the Triton step computes (`why_not_triton`).
        kv_cache: numbers of keys and values, `auto` or, in the Triton step, `fp8`.

    Raises as `open_parts` does, and TritonUnavailable.
    """
    if triton:
        return _load_triton_parts(model, links, stop_word, device, stage, held, kv_cache)
    if kv_cache != "auto":
        raise UnsupportedModel(f"kv-cache-dtype {kv_cache} is not kept by parts that torch computes")
    _, weights = _read_own(model, links, stage)
    backend = PartsBackend(
        model.shape,
        model.parts,
        weights,
        links,
        model.stages[stage],
        stop_word=stop_word,
        threads=threads,
        device=device,
        held=held,
    )
    return LoadedParts(backend, weight_bytes(weights))


def why_not_triton(shape: ModelShape, precision: Precision) -> str | None:
    """Return None if the Triton step computes a model in parts, or else why not, in words."""
    # Imported here: Triton is not installed everywhere.
    from diptych.engine.backends.triton.supports import supports

    if precision not in ON_GPU:
        return f"the Triton step does not compute {precision}"
    why = supports(shape)
    return None if why is None else f"the Triton step does not compute {why}"


def _load_triton_parts(
    model: OpenParts,
    links: Links,
    stop_word: StopWord,
    device: torch.device | str,
    stage: int,
    held: KVShare | None,
    kv_cache: KVCacheDtype,
) -> LoadedParts:
    from diptych.engine.backends.triton.parts_backend import TritonPartsBackend

    _, weights = _read_own(model, links, stage)
    backend = TritonPartsBackend(
        model.shape,
        model.parts,
        weights,
        links,
        model.stages[stage],
        stop_word=stop_word,
        device=device,
        kv_scales=kept_scales(kv_cache, model.shape, model.opened.kv_scales),
        held=held,
    )
    return LoadedParts(backend, weight_bytes(weights), "triton-parts")


def join_group(
    number: int,
    grid: Grid,
    exchange_fds: Sequence[int],
    open_store: Callable[[], c10d.Store],
    device: torch.device,
    host: str | None = None,
) -> Links:
    """Join the communicators of a group as process `number`: over a file each, of which `exchange_fds` are
    this process', on CPUs that order stores, else over a library; on GPUs over NCCL, or where processes share
    a card over Gloo with copies through the host (cards.py).

    A group over several hosts has no such files: `host` is the address of this process in it.

    Raises GroupBroken, OSError.
    """
    own = own_ways(number, grid)
    if host is None and device.type != "cuda" and shared_memory_communicator.works_here():
        files = zip(own, exchange_fds, strict=True)
        return links_of(
            number,
            [
                (way, SharedMemoryCommunicator(fd, way.members.index(number), len(way.members)))
                for way, fd in files
            ],
        )
    store = open_store()
    exchange = agree_on_exchange(store, number, grid.size, device) if device.type == "cuda" else "gloo"
    joined = [(way, _over_library(way, number, store, device, host or LOOPBACK, exchange)) for way in own]
    return links_of(number, joined)


def _over_library(
    way: Way, number: int, store: c10d.Store, device: torch.device, host: str, exchange: Exchange
) -> Communicator:
    rank, ranks = way.members.index(number), len(way.members)
    name = f"{way.kind}-{way.members[0]}"
    under = c10d.PrefixStore(name, store)
    if exchange == "gloo":
        over_host = GlooCommunicator(under, rank, ranks, host)
        return over_host if device.type == "cpu" else HostCopies(over_host, device)
    made = NcclCommunicator(under, rank, ranks, device)
    return over_peer_memory(made, under, name, device) if exchange == "peers" else made
