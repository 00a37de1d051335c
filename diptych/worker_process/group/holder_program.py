"""Service of a rank with memories of its own, once it is loaded, on this host or another.

    control   memories are made and dropped, on a thread
    plans     taken as they come on a thread; steps are computed and shares written in this order
    blocks    shares that rank 0 reads, on a thread
    shares    shares that go to ranks of other workers, or come from them, on threads beside the steps

The end of any connection is the end of the group.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from diptych.engine.parallel_model import LoadedParts
from diptych.runtime.process import leave
from diptych.worker_process.group.mapping_service import MappingService
from diptych.worker_process.group.orders import BlockOrder, Planned, StartRank
from diptych.worker_process.group.rank_adapters import RankAdapters
from diptych.worker_process.group.rank_memories import Memories
from diptych.worker_process.group.rank_steps import carry_out
from diptych.worker_process.group.rendezvous import Ends
from diptych.worker_process.group.share_memory import ShareMemory
from diptych.worker_process.group.share_service import ShareService
from kvtransfer.transports.registry import mapping_for

_log = logging.getLogger(__name__)


def serve_holder(
    ends: Ends,
    order: StartRank,
    loaded: LoadedParts,
    memories: Memories,
    adapters: RankAdapters,
) -> NoReturn:
    """Serve rank 0's connections by kind, and compute until rank 0 is gone, which ends the process."""
    own = ShareMemory(memories.mapped)
    mappings = MappingService(order.holder, own, memories.pool, mapping_for(memories.device))
    shares = ShareService(ends["shares"], order.share_host, order.holder, own, mappings)
    planned: queue.SimpleQueue[Planned] = queue.SimpleQueue()
    begin("memories", memories.serve)
    begin("blocks", lambda: own.answer(ends["blocks"]))
    begin("shares", shares.serve)
    begin("plans", lambda: _take_plans(ends["plans"], planned))
    _compute(ends["plans"], planned, loaded, memories, adapters, own)


def begin(name: str, serve: Callable[[], object]) -> None:
    """Serve a connection on a thread; its end is that of the group."""

    def until_gone() -> None:
        try:
            serve()
        except (OSError, EOFError):
            leave_group()
        except Exception:
            _log.exception("this rank fails, and the group with it")
            leave(1)

    threading.Thread(target=until_gone, name=name, daemon=True).start()


def leave_group() -> NoReturn:
    """End the process, as the group is over."""
    _log.info("the group is over")
    leave(0)


def _compute(
    plans: Connection[Any, Any],
    planned: queue.SimpleQueue[Planned],
    loaded: LoadedParts,
    memories: Memories,
    adapters: RankAdapters,
    own: ShareMemory,
) -> NoReturn:
    """Compute steps and carry out what comes between them, in order."""
    try:
        while True:
            order = planned.get()
            if isinstance(order, BlockOrder):
                own.carry_out(order)
            else:
                carry_out(order, loaded.backend, memories, adapters, plans)
    except (OSError, EOFError):
        leave_group()
    except Exception:
        _log.exception("a step failed: the group ends")
        leave(1)


def _take_plans(plans: Connection[Any, Any], planned: queue.SimpleQueue[Planned]) -> None:
    """Take what rank 0 sends as it comes, so that it never waits for a step of this rank to send."""
    while True:
        planned.put(plans.recv())
