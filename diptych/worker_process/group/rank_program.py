"""The program of ranks 1 and up: load a share of the model, then compute it in every step of rank 0's.

Arguments: name in logs, log level, and the descriptors of the two pipes, the stop word, the death pipe, the
file of a native step's sums, and the files of the exchanges.
Only rank 0 starts it. It serves no port, and a signal that asks to stop is rank 0's business.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from diptych.engine.backends.native.parts_backend import NativePartsBackend
from diptych.engine.backends.torch.parts_backend import PartsBackend
from diptych.engine.parallel.gloo_communicator import BUILD_S
from diptych.engine.parallel.step_plan import StepPlan, follow_plan
from diptych.engine.parallel.stop_word import RunToEnd, StopWord
from diptych.engine.parallel_model import (
    LoadedParts,
    join_group,
    load_native_parts,
    load_parts,
    open_parts,
)
from diptych.runtime.process import leave, watch_parent
from diptych.worker_process.group.orders import AdapterOrder, RankFailed, RankReady, StartRank
from diptych.worker_process.group.rank_adapters import RankAdapters
from diptych.worker_process.group.rank_memories import Memories, log_as
from kvtransfer.transports.process_group import open_store

_log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> None:
    """Serve as one rank until rank 0 is gone."""
    name, log_level, *descriptors = argv
    plans_fd, control_fd, stop_fd, death_fd, sums_fd, *exchange_fds = map(int, descriptors)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    watch_parent(death_fd)
    log_as(name, log_level)
    control: Connection[Any, Any] = Connection(control_fd)
    plans: Connection[Any, Any] = Connection(plans_fd)
    try:
        order: StartRank = control.recv()
        loaded = _load(order, StopWord(stop_fd), sums_fd, exchange_fds)
    except Exception as error:
        _log.exception("this rank cannot start")
        control.send(RankFailed(str(error) or repr(error)))
        control.recv()  # rank 0 says why, and ends
        raise
    control.send(RankReady(loaded.weight_bytes))
    adapters = RankAdapters(loaded.backend)
    memories = Memories(control, adapters, prefault=not order.across_hosts)
    threading.Thread(target=memories.serve, name="memories", daemon=True).start()
    try:
        _compute(plans, loaded.backend, memories, adapters)
    except (OSError, EOFError):
        leave(0)  # rank 0 is gone
    except Exception:
        _log.exception("a step failed: the group ends")
        leave(1)


def _load(order: StartRank, stop_word: StopWord, sums_fd: int, exchange_fds: Sequence[int]) -> LoadedParts:
    torch.set_num_threads(order.threads)
    model = open_parts(order.model, order.precision, order.dealing, order.max_context)
    device = torch.device(order.device)
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
        return load_native_parts(model, order.precision, links, sums, order.threads, stage)
    word = RunToEnd() if order.across_hosts else stop_word
    return load_parts(model, links, word, order.threads, device, stage)


def _compute(
    plans: Connection[Any, Any],
    backend: PartsBackend | NativePartsBackend,
    memories: Memories,
    adapters: RankAdapters,
) -> None:
    """Compute steps as their plans come; those of the native step end without a word from here."""
    while True:
        order: StepPlan | AdapterOrder = plans.recv()
        if not isinstance(order, StepPlan):
            adapters.carry_out(order)
        elif isinstance(backend, PartsBackend):
            backend.forward(follow_plan(order, memories.mapped), None)
            plans.send_bytes(b"")
        else:
            backend.follow(follow_plan(order, memories.mapped), order.greedy)


if __name__ == "__main__":
    main(sys.argv[1:])
