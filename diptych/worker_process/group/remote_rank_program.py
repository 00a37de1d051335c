"""A rank of a group whose rank 0 is on another host: the process that `diptych rank` starts.

It joins (rendezvous.py), loads its share of the model, computes it in every step, and ends with rank 0.
It has a memory of its own for each memory of rank 0, with its share of each block. It registers with no
worker of the other role, and nothing outside its process is written by it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from diptych.engine.backends.torch.parts_backend import PartsBackend
from diptych.engine.parallel.gloo_communicator import BUILD_S
from diptych.engine.parallel.kv_shares import KVShare, kv_shares
from diptych.engine.parallel.step_plan import StepPlan, follow_plan
from diptych.engine.parallel.stop_word import RunToEnd
from diptych.engine.parallel_model import LoadedParts, join_group, load_parts, open_parts
from diptych.runtime.host_port import parse_address
from diptych.runtime.model_files import fetched_model
from diptych.runtime.process import leave, watch_parent
from diptych.runtime.settings import CANNOT_START, StartupError
from diptych.worker_process.group import rendezvous
from diptych.worker_process.group.orders import (
    DropAdapter,
    PlaceAdapter,
    Planned,
    RankFailed,
    RankReady,
    StartRank,
)
from diptych.worker_process.group.rank_adapters import RankAdapters
from diptych.worker_process.group.rank_key import read_rank_key
from diptych.worker_process.group.rank_memories import Memories, log_as
from diptych.worker_process.group.same_files import files_digest
from diptych.worker_process.group.share_memory import ShareMemory
from diptych.worker_process.group.share_service import ShareService
from kvtransfer.transports.process_group import open_store

CANNOT_SERVE = 2
"""Exit status of a rank that another start would not help, as one without the model."""
_AGAIN_S = 1.0
"""Seconds between two looks for a rank 0 that does not listen yet."""
_log = logging.getLogger(__name__)


class OtherFiles(StartupError):
    """A model whose files are not those of rank 0."""


def serve_rank(address: str, key_file: Path, model: str) -> NoReturn:
    """Join a group, and compute until rank 0 is gone, which ends the process. Raises StartupError."""
    key = read_rank_key(key_file)
    path = fetched_model(model)
    ends = _join(*parse_address(address), key)
    control, plans = ends["control"], ends["plans"]
    refused = threading.Event()
    _start("life", lambda: _await_end(ends["life"], refused))
    try:
        order: StartRank = control.recv()
        loaded, share = _load(order, path)
    except (OSError, EOFError):
        _leave_group()
    except Exception as error:
        refused.set()
        _log.exception("this rank cannot start")
        with contextlib.suppress(OSError, EOFError):
            control.send(RankFailed(str(error) or repr(error)))
            control.recv()  # rank 0 says why, and ends
        raise
    control.send(RankReady(loaded.weight_bytes))
    adapters = RankAdapters(loaded.backend)
    memories = Memories(control, adapters, share)
    own = ShareMemory(memories.mapped)
    shares = ShareService(ends["shares"], order.host, order.holder, own)
    _start("memories", memories.serve)
    _start("blocks", lambda: own.answer(ends["blocks"]))
    _start("shares", shares.serve)
    planned: queue.SimpleQueue[Planned] = queue.SimpleQueue()
    _start("plans", lambda: _take_plans(plans, planned))
    _log.info("this rank is part of a group: %d MiB of weights", loaded.weight_bytes >> 20)
    _compute(plans, planned, loaded, memories, adapters, own)


def _await_end(life: Connection[Any, Any], refused: threading.Event) -> None:
    """Wait for the end of the group. Raises OSError, EOFError, unless this rank refused it and says why."""
    try:
        life.recv_bytes()
    except (OSError, EOFError):
        if not refused.is_set():
            raise


def _compute(
    plans: Connection[Any, Any],
    planned: queue.SimpleQueue[Planned],
    loaded: LoadedParts,
    memories: Memories,
    adapters: RankAdapters,
    own: ShareMemory,
) -> NoReturn:
    """Compute steps and carry out what comes between them, in order."""
    assert isinstance(loaded.backend, PartsBackend), "torch computes where memory is not common"
    try:
        while True:
            order = planned.get()
            if isinstance(order, StepPlan):
                loaded.backend.forward(follow_plan(order, memories.mapped), None)
                plans.send_bytes(b"")
            elif isinstance(order, PlaceAdapter | DropAdapter):
                adapters.carry_out(order)
            else:
                own.carry_out(order)
    except (OSError, EOFError):
        _leave_group()
    except Exception:
        _log.exception("a step failed: the group ends")
        leave(1)


def _take_plans(plans: Connection[Any, Any], planned: queue.SimpleQueue[Planned]) -> None:
    """Take what rank 0 sends as it comes, so that it never waits for a step of this rank to send."""
    while True:
        planned.put(plans.recv())


def _load(order: StartRank, path: Path) -> tuple[LoadedParts, KVShare]:
    """Load this rank's share of the model, and return its share of each block. Raises OtherFiles, and what
    `load_parts` raises.
    """
    if files_digest(path) != order.files_digest:
        raise OtherFiles(f"{path} has other files than the model of rank 0")
    torch.set_num_threads(order.threads)
    model = open_parts(path, order.precision, order.dealing, order.max_context)
    links = join_group(
        order.number,
        order.grid,
        (),
        lambda: open_store(order.store_host, order.store_port, None, BUILD_S),
        torch.device(order.device),
        order.host,
    )
    stage, _ = order.grid.place(order.number)
    share = kv_shares(model.parts, model.stages, order.grid)[order.number]
    return load_parts(model, links, RunToEnd(), order.threads, order.device, stage, share), share


def _join(host: str, port: int, key: bytes) -> rendezvous.Ends:
    """Join the group at an address, once its rank 0 is there."""
    said = ""
    while True:
        try:
            return rendezvous.join(host, port, key)
        except OSError as error:
            if str(error) != said:
                said = str(error)
                _log.info("no group at %s:%d yet: %s", host, port, said)
            time.sleep(_AGAIN_S)


def _start(name: str, serve: Callable[[], object]) -> None:
    """Serve a connection on a thread; its end is that of the group."""

    def until_gone() -> None:
        try:
            serve()
        except (OSError, EOFError):
            _leave_group()
        except Exception:
            _log.exception("this rank fails, and the group with it")
            leave(1)

    threading.Thread(target=until_gone, name=name, daemon=True).start()


def _leave_group() -> NoReturn:
    _log.info("the group is over")
    leave(0)


def main(argv: Sequence[str]) -> int:
    """Serve as one rank: address of the rendezvous, key file, model, log level, descriptor of a death pipe.

    Returns the exit status where it cannot join any group.
    """
    address, key_file, model, log_level, death_fd = argv
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # they are the parent's business
    watch_parent(int(death_fd))
    log_as(f"rank/{socket.gethostname()}", log_level)
    try:
        serve_rank(address, Path(key_file), model)
    except StartupError as error:
        _log.error("%s%s", CANNOT_START, error)
        return CANNOT_SERVE


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
