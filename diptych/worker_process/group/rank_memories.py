"""The KV memories of a rank, and its log."""

from __future__ import annotations

import logging
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from os import close
from typing import Any

from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.parallel.kv_shares import KVShare
from diptych.runtime.log_format import OneLineFormatter
from diptych.runtime.nonblocking_stderr import NonblockingStream
from diptych.runtime.process import leave
from diptych.worker_process.group.orders import (
    AllocateShare,
    DropMemory,
    LoadAdapter,
    MapFile,
    Order,
    RankFailed,
    RegisterPool,
)
from diptych.worker_process.group.rank_adapters import RankAdapters
from kvtransfer.transports.base import TransportError, host_id
from kvtransfer.transports.fd_passing import register_blocking
from kvtransfer.transports.memory_mapping import HostMapping
from kvtransfer.transports.pool_memory import map_pool

_log = logging.getLogger(__name__)


def log_as(name: str, level: str) -> None:
    """Send all logging of this process to stderr, as PROGRAM/WORKER."""
    program, _, worker = name.partition("/")
    handler = logging.StreamHandler(NonblockingStream(sys.stderr))
    handler.setFormatter(OneLineFormatter(program, worker))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


class Memories:
    """KV memories by number, made and dropped as rank 0 orders on a thread of its own.

    Args:
        adapters: what loads the adapters that rank 0 sends over the same connection.
        share: this rank's share of each block, where it has memories of its own.
        prefault: whether mapped blocks take their pages at once.
    """

    def __init__(
        self,
        control: Connection[Any, Any],
        adapters: RankAdapters,
        share: KVShare | None = None,
        *,
        prefault: bool = True,
    ) -> None:
        self._control, self._share, self._prefault = control, share, prefault
        self._adapters = adapters
        self.mapped: dict[int, KVMemory] = {}

    def serve(self) -> None:
        """Carry out orders until rank 0 is gone, which ends the process."""
        try:
            while True:
                order: Order = self._control.recv()
                if isinstance(order, DropMemory):
                    self.mapped.pop(order.number, None)
                elif isinstance(order, LoadAdapter):
                    self._control.send(self._adapters.load(order))
                else:
                    self._control.send(self._carry_out(order))
        except (OSError, EOFError):
            leave(1)
        except Exception:
            _log.exception("this rank fails, and the group with it")  # else rank 0 would wait for an answer
            leave(1)

    def _carry_out(self, order: Order) -> RankFailed | None:
        try:
            match order:
                case MapFile(number, layout, num_blocks):
                    fd = recv_handle(self._control)
                    self.mapped[number] = map_pool(fd, layout, num_blocks, prefault=self._prefault)
                    close(fd)
                case AllocateShare(number, layout, num_blocks) if self._share is not None:
                    self.mapped[number] = KVMemory(self._share.narrow(layout), num_blocks)
                case RegisterPool(number, welcome):
                    self.mapped[number] = register_blocking(
                        welcome,
                        lambda pool: HostMapping(host_id()).map(pool, welcome.layout, welcome.num_blocks),
                    )
        except (OSError, ValueError, TransportError) as error:
            return RankFailed(str(error))
        return None
