"""The program of ranks 1 and up: load a share of the model, then compute it in every step of rank 0's.

Arguments: name in logs, log level, and the descriptors of the connections (orders.py), the stop word, the
death pipe, the file of a native step's sums, and the files of the exchanges.
Only rank 0 starts it. It serves no port, and a signal that asks to stop is rank 0's business.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

from diptych.engine.parallel.stop_word import RunToEnd, StopWord
from diptych.runtime.process import leave, watch_parent
from diptych.worker_process.group.holder_program import serve_holder
from diptych.worker_process.group.orders import CONNECTIONS, RankFailed, RankReady, StartRank
from diptych.worker_process.group.rank_adapters import RankAdapters
from diptych.worker_process.group.rank_load import device_of, load_rank
from diptych.worker_process.group.rank_memories import Memories, log_as
from diptych.worker_process.group.rank_steps import carry_out
from diptych.worker_process.group.rendezvous import Ends
from kvtransfer.transports.base import gpu_uuid

_log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> None:
    """Serve as one rank until rank 0 is gone."""
    name, log_level, *descriptors = argv
    fds = [int(fd) for fd in descriptors]
    ends: Ends = {kind: Connection(fds.pop(0)) for kind in CONNECTIONS}
    stop_fd, death_fd, sums_fd, *exchange_fds = fds
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    watch_parent(death_fd)
    log_as(name, log_level)
    control, plans = ends["control"], ends["plans"]
    try:
        order: StartRank = control.recv()
        device = device_of(order)
        word = RunToEnd() if order.across_hosts else StopWord(stop_fd)
        loaded, share = load_rank(order, order.model, device, word, sums_fd, exchange_fds)
    except Exception as error:
        _log.exception("this rank cannot start")
        control.send(RankFailed(str(error) or repr(error)))
        control.recv()  # rank 0 says why, and ends
        raise
    control.send(RankReady(loaded.weight_bytes, gpu_uuid(device)))
    adapters = RankAdapters(loaded.backend)
    memories = Memories(
        control,
        adapters,
        share,
        device,
        prefault=not order.across_hosts,
        weights=loaded.weight_bytes,
    )
    if order.holder:
        serve_holder(ends, order, loaded, memories, adapters)
    threading.Thread(target=memories.serve, name="memories", daemon=True).start()
    try:
        while True:
            carry_out(plans.recv(), loaded.backend, memories, adapters, plans)
    except (OSError, EOFError):
        leave(0)  # rank 0 is gone
    except Exception:
        _log.exception("a step failed: the group ends")
        leave(1)


if __name__ == "__main__":
    main(sys.argv[1:])
