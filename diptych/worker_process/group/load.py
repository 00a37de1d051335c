"""Load of a model that is computed in parts, by this process alone or with the other ranks of its group."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from diptych.engine.dtype import PLAIN, Precision
from diptych.engine.loaded_model import Model
from diptych.engine.parallel.communicator import GroupBroken
from diptych.engine.parallel.pipeline import ALONE
from diptych.engine.parallel.stop_word import StopWord
from diptych.engine.parallel_model import Dealing, LoadedParts, OpenParts, load_parts, open_parts
from diptych.engine.usable_cores import usable_cores
from diptych.runtime.settings import StartupError
from diptych.worker_process.config import WorkerSettings
from diptych.worker_process.group.group_backend import GroupBackend
from diptych.worker_process.group.orders import StartRank
from diptych.worker_process.group.rank_group import RankGroup
from kvtransfer.transports.base import TransportError

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
    dealing = Dealing(settings.parts, settings.pipeline_parallel, settings.expert_parallel)
    model = open_parts(path, precision, dealing, settings.max_model_len)
    # Stages of a pipeline compute in turn: each has all threads.
    threads = threads_of_rank(settings.threads or usable_cores(), settings.tensor_parallel)
    dtype = PLAIN[precision]
    if group is None:
        loaded = load_parts(model, ALONE, StopWord(), threads, device)
        return Model(model.shape, precision, dtype, loaded.backend, "torch-parts", device)
    order = StartRank(
        number=0,
        grid=group.grid,
        model=path,
        precision=precision,
        dealing=dealing,
        max_context=settings.max_model_len,
        threads=threads,
        device=str(device),
        store_port=0,
    )
    try:
        loaded = _load_everywhere(model, order, group, device)
    except (GroupBroken, TransportError, OSError) as error:
        raise GroupCannotStart(f"{settings.group_flags}: {error}") from error
    backend = GroupBackend(loaded.backend, group)
    return Model(
        model.shape, precision, dtype, backend, "torch-parts", device, make_memory=group.memories.allocate
    )


def threads_of_rank(threads: int, ranks: int) -> int:
    """Return the threads of each rank of a worker that has so many in all; at least one."""
    return max(1, threads // ranks)


def _load_everywhere(
    model: OpenParts, order: StartRank, group: RankGroup, device: torch.device
) -> LoadedParts:
    links = group.join(order)
    loaded = load_parts(model, links, group.stop_word, order.threads, device)
    sizes = [loaded.weight_bytes, *group.wait_loaded()]
    _log.info(
        "%d ranks in %d stages of %d parts, MiB of weights in each: %s",
        group.size,
        group.grid.stages,
        order.dealing.parts,
        ", ".join(f"{size / 2**20:.0f}" for size in sizes),
    )
    return loaded
