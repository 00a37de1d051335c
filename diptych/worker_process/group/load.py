"""Load of a model that is computed in parts, by this process alone or with the other ranks of its group."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from diptych.engine.backends.native.parts_backend import NativePartsBackend
from diptych.engine.backends.torch.parts_backend import PartsBackend
from diptych.engine.dtype import PLAIN, Precision, kept_dtype
from diptych.engine.loaded_model import Model
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.parallel.communicator import GroupBroken
from diptych.engine.parallel.kv_shares import KVShare, kv_shares
from diptych.engine.parallel.pipeline import ALONE, Links
from diptych.engine.parallel.stages import Grid
from diptych.engine.parallel.stop_word import StopWord
from diptych.engine.parallel_model import (
    Dealing,
    LoadedParts,
    OpenParts,
    load_native_parts,
    load_parts,
    open_parts,
    why_not_native,
    why_not_triton,
)
from diptych.engine.usable_cores import usable_cores
from diptych.runtime.settings import StartupError
from diptych.worker_process.config import WorkerSettings
from diptych.worker_process.group.group_backend import GroupBackend
from diptych.worker_process.group.native_group_backend import NativeGroupBackend
from diptych.worker_process.group.orders import StartRank
from diptych.worker_process.group.rank_group import RankGroup
from diptych.worker_process.group.same_files import files_digest
from kvtransfer.transports.base import TransportError

if TYPE_CHECKING:
    from diptych.worker_process.group.triton_group_backend import TritonGroupBackend

_log = logging.getLogger(__name__)


class GroupCannotStart(StartupError):
    """Ranks that did not find each other."""


def load_in_parts(
    settings: WorkerSettings,
    path: Path,
    precision: Precision,
    device: torch.device,
    group: RankGroup | None,
) -> Model:
    """Load this process' parts of the model, and have the ranks of `group` load theirs.

    Raises what `load_model` raises, RankCannotStart and GroupCannotStart. Blocks, so not on the event loop.
    """
    dealing = _dealing(settings)
    model = open_parts(path, precision, dealing, settings.max_model_len)
    on_gpu = device.type == "cuda" or settings.backend == "triton"
    why_torch = _why_torch_on_gpu(model, precision) if on_gpu else _why_torch(settings, model, precision)
    # Stages of a pipeline compute in turn: each has all threads.
    order = StartRank(
        number=0,
        grid=Grid(1) if group is None else group.grid,
        model=path,
        precision=precision,
        native=not on_gpu and why_torch is None,
        dealing=dealing,
        max_context=settings.max_model_len,
        threads=threads_of_rank(settings.threads or usable_cores(), settings.ranks_here),
        device=str(device),
        store_port=0,
        files_digest=files_digest(path) if settings.remote_ranks else b"",
        triton=on_gpu and why_torch is None,
        kv_cache=settings.kv_cache_dtype,
    )
    try:
        if group is None:
            loaded = _load_own(model, order, ALONE, StopWord(), -1, None)
        else:
            loaded = _load_everywhere(model, order, group)
    except (GroupBroken, TransportError, OSError) as error:
        raise GroupCannotStart(f"{settings.group_flags}: {error}") from error
    return Model(
        model.shape,
        precision,
        kept_dtype(settings.kv_cache_dtype, precision),
        loaded.backend if group is None else _with_others(loaded, group),
        loaded.name,
        device,
        None if settings.backend == "torch" else why_torch,
        make_memory=None if group is None else group.memories.allocate,
    )


def computes_natively(settings: WorkerSettings, path: Path) -> bool:
    """Return whether the native step computes this model in parts, in int8 as in full numbers.

    Raises what opening the model raises.
    """
    shape = open_parts(path, "fp32", _dealing(settings)).shape
    apart = settings.remote_ranks or settings.own_memories
    return not apart and why_not_native(shape, "int8", _dealing(settings)) is None


def _dealing(settings: WorkerSettings) -> Dealing:
    return Dealing(settings.parts, settings.pipeline_parallel, settings.expert_parallel, settings.all_to_all)


def _why_torch(settings: WorkerSettings, model: OpenParts, precision: Precision) -> str | None:
    """Return None where the native step computes, or else why torch does, in words.

    Raises UnsupportedModel where torch does not either, or the native step was asked for.
    """
    if settings.backend == "torch":
        why = "--backend torch"
    elif settings.remote_ranks:
        why = "ranks on other hosts share no memory, in which the native step exchanges sums"
    elif settings.own_memories:
        why = "each rank has memories of its own, and the native step has whole blocks"
    elif (found := why_not_native(model.shape, precision, _dealing(settings))) is not None:
        why = found
    else:
        return None
    if settings.backend == "native" or precision not in PLAIN:
        raise UnsupportedModel(f"{settings.group_flags} in {precision}: {why}")
    if settings.backend != "torch":
        _log.warning("torch computes, which is slower: %s", why)
    return why


def _why_torch_on_gpu(model: OpenParts, precision: Precision) -> str | None:
    """Return None where the Triton step computes, or else why torch does, in words.

    Raises UnsupportedModel where torch does not either.
    """
    why = why_not_triton(model.shape, precision)
    if why is not None and precision not in PLAIN:
        raise UnsupportedModel(f"dtype {precision}: {why}")
    if why is not None:
        _log.warning("torch computes, which is slower: %s", why)
    return why


def _with_others(
    loaded: LoadedParts, group: RankGroup
) -> GroupBackend | NativeGroupBackend | TritonGroupBackend:
    """Return the backend of rank 0, whose steps all ranks compute."""
    match loaded.backend:
        case PartsBackend():
            return GroupBackend(loaded.backend, group)
        case NativePartsBackend():
            return NativeGroupBackend(loaded.backend, group)
        case on_triton:
            # Imported here: Triton is not installed everywhere.
            from diptych.worker_process.group.triton_group_backend import TritonGroupBackend

            return TritonGroupBackend(on_triton, group)


def threads_of_rank(threads: int, ranks: int) -> int:
    """Return the threads of each rank of a worker that has so many in all; at least one."""
    return max(1, threads // ranks)


def _load_own(
    model: OpenParts, order: StartRank, links: Links, stop_word: StopWord, sums: int, held: KVShare | None
) -> LoadedParts:
    """Load what this process computes; its memories have room for `held` of each block, None: for all."""
    if order.native:
        return load_native_parts(model, order.precision, links, sums, order.threads)
    return load_parts(
        model,
        links,
        stop_word,
        order.threads,
        order.device,
        held=held,
        triton=order.triton,
        kv_cache=order.kv_cache,
    )


def _load_everywhere(model: OpenParts, order: StartRank, group: RankGroup) -> LoadedParts:
    links = group.join(order, kv_shares(model.parts, model.stages, group.grid))
    loaded = _load_own(model, order, links, group.stop_word, group.sums_of(0), group.memories.held)
    group.weight_bytes = sizes = [loaded.weight_bytes, *group.wait_loaded()]
    _log.info(
        "%d ranks in %d stages of %d parts, MiB of weights in each: %s",
        group.size,
        group.grid.stages,
        order.dealing.parts,
        ", ".join(f"{size / 2**20:.0f}" for size in sizes),
    )
    return loaded
