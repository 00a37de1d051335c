"""A rank of a group whose rank 0 is on another host: the process that `diptych rank` starts.

It joins (rendezvous.py), loads its share of the model, computes it in every step, and ends with rank 0.
It has a memory of its own for each memory of rank 0, with its share of each block. It registers with no
worker of the other role, and nothing outside its process is written by it.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from diptych.engine.parallel.stop_word import RunToEnd
from diptych.runtime.host_port import parse_address
from diptych.runtime.model_files import fetched_model
from diptych.runtime.process import leave, watch_parent
from diptych.runtime.settings import CANNOT_START, StartupError
from diptych.worker_process.group import rendezvous
from diptych.worker_process.group.holder_program import begin, leave_group, serve_holder
from diptych.worker_process.group.orders import RankFailed, RankReady, StartRank
from diptych.worker_process.group.rank_adapters import RankAdapters
from diptych.worker_process.group.rank_key import read_rank_key
from diptych.worker_process.group.rank_load import device_of, load_rank
from diptych.worker_process.group.rank_memories import Memories, log_as
from diptych.worker_process.group.same_files import files_digest
from kvtransfer.transports.base import gpu_uuid

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
    control = ends["control"]
    refused = threading.Event()
    begin("life", lambda: _await_end(ends["life"], refused))
    try:
        order: StartRank = control.recv()
        device = device_of(order)
        loaded, share = load_rank(order, _checked(path, order), device, RunToEnd())
    except (OSError, EOFError):
        leave_group()
    except Exception as error:
        refused.set()
        _log.exception("this rank cannot start")
        with contextlib.suppress(OSError, EOFError):
            control.send(RankFailed(str(error) or repr(error)))
            control.recv()  # rank 0 says why, and ends
        raise
    control.send(RankReady(loaded.weight_bytes, gpu_uuid(device)))
    _log.info("this rank is part of a group: %d MiB of weights", loaded.weight_bytes >> 20)
    adapters = RankAdapters(loaded.backend)
    memories = Memories(control, adapters, share, device, weights=loaded.weight_bytes)
    serve_holder(ends, order, loaded, memories, adapters)


def _await_end(life: Connection[Any, Any], refused: threading.Event) -> None:
    """Wait for the end of the group. Raises OSError, EOFError, unless this rank refused it and says why."""
    try:
        life.recv_bytes()
    except (OSError, EOFError):
        if not refused.is_set():
            raise


def _checked(path: Path, order: StartRank) -> Path:
    """Return the path of a model whose files are those of rank 0. Raises OtherFiles."""
    if files_digest(path) != order.files_digest:
        raise OtherFiles(f"{path} has other files than the model of rank 0")
    return path


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
