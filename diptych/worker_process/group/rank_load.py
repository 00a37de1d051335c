"""Load of what a rank other than 0 computes, on this host or another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from diptych.engine.parallel.gloo_communicator import BUILD_S
from diptych.engine.parallel.kv_shares import KVShare, kv_shares
from diptych.engine.parallel.stop_word import StopWord
from diptych.engine.parallel_model import LoadedParts, join_group, load_native_parts, load_parts, open_parts
from diptych.worker_process.group.orders import StartRank
from diptych.worker_process.group.rank_devices import device_here
from kvtransfer.transports.process_group import open_store


def device_of(order: StartRank) -> torch.device:
    """Return the device of a rank, and make it the one of the calling thread."""
    device = torch.device(device_here(order.device, torch.cuda.device_count()))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def load_rank(
    order: StartRank,
    path: Path,
    device: torch.device,
    stop_word: StopWord,
    sums_fd: int = -1,
    exchange_fds: Sequence[int] = (),
) -> tuple[LoadedParts, KVShare | None]:
    """Join the group and load this rank's share of the model at `path`; return its share of each block, too,
    where it has memories of its own.

    Args:
        sums_fd: file of a native step's sums.
        exchange_fds: files of the exchanges; none across hosts.

    Raises what `load_parts` raises, GroupBroken and TransportError.
    """
    torch.set_num_threads(order.threads)
    model = open_parts(path, order.precision, order.dealing, order.max_context)
    links = join_group(
        order.number,
        order.grid,
        exchange_fds,
        lambda: open_store(order.store_host, order.store_port, None, BUILD_S),
        device,
        order.host if order.across_hosts else None,
    )
    stage, _ = order.grid.place(order.number)
    if order.native:
        sums = sums_fd if order.grid.ranks > 1 else -1
        return load_native_parts(model, order.precision, links, sums, order.threads, stage), None
    share = kv_shares(model.parts, model.stages, order.grid)[order.number] if order.holder else None
    loaded = load_parts(
        model,
        links,
        stop_word,
        order.threads,
        device,
        stage,
        share,
        triton=order.triton,
        kv_cache=order.kv_cache,
    )
    return loaded, share
