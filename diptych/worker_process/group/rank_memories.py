"""The KV memories of a rank, and its log."""

from __future__ import annotations

import logging
import sys
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from os import close
from typing import Any

import torch

from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.parallel.card_room import CardRoom, room_of_card
from diptych.engine.parallel.kv_shares import KVShare
from diptych.runtime.log_format import OneLineFormatter
from diptych.runtime.nonblocking_stderr import NonblockingStream
from diptych.runtime.process import leave
from diptych.worker_process.group.orders import (
    AdapterQuestion,
    AllocateShare,
    CountBlocks,
    DropMemory,
    MapFile,
    MeasureMemory,
    Order,
    RankFailed,
    RegisterPool,
)
from diptych.worker_process.group.rank_adapters import RankAdapters
from diptych.worker_process.group.rank_memory import RankMemory, measure_rank
from kvtransfer.transports.base import CPU, TransportError, Welcome
from kvtransfer.transports.fd_passing import register_blocking
from kvtransfer.transports.in_place_by_rank import map_share
from kvtransfer.transports.memory_mapping import ExportedPool, MemoryMapping
from kvtransfer.transports.pool_memory import PoolMemory, allocate_share, map_pool
from kvtransfer.transports.registry import mapping_for

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
        device: device of these.
        prefault: whether mapped blocks take their pages at once.
        weights: bytes of this rank's weights.
    """

    def __init__(
        self,
        control: Connection[Any, Any],
        adapters: RankAdapters,
        share: KVShare | None = None,
        device: torch.device = CPU,
        *,
        prefault: bool = True,
        weights: int = 0,
    ) -> None:
        self._control, self._share, self._prefault = control, share, prefault
        self._weights = weights
        self.device = device
        self._adapters = adapters
        self.mapped: dict[int, KVMemory] = {}
        self._files: dict[int, int | None] = {}
        """Files of this rank's own memories; None on a GPU."""

    def serve(self) -> None:
        """Carry out orders until rank 0 is gone, which ends the process."""
        try:
            while True:
                order: Order = self._control.recv()
                if isinstance(order, DropMemory):
                    self._drop(order.number)
                elif isinstance(order, AdapterQuestion):
                    self._control.send(self._adapters.answer(order))
                else:
                    self._control.send(self._carry_out(order))
        except (OSError, EOFError):
            leave(1)
        except Exception:
            _log.exception("this rank fails, and the group with it")  # else rank 0 would wait for an answer
            leave(1)

    def pool(self, number: int) -> PoolMemory:
        """Return a memory of this rank's own as other processes can map it."""
        return PoolMemory(self.mapped[number], self._files[number])

    def _drop(self, number: int) -> None:
        self.mapped.pop(number, None)
        if (fd := self._files.pop(number, None)) is not None:
            close(fd)

    def _measure(self, layout: KVLayout, num_blocks: int) -> RankMemory:
        """Return what this rank's memory is taken by."""
        a_block = 0 if self._share is None else self._share.narrow(layout).bytes_per_block
        own = [self.mapped[number] for number in self._files]
        allocated = sum(memory.data.nbytes for memory in own)
        return measure_rank(self.device, self._weights, a_block * num_blocks, allocated)

    def _carry_out(self, order: Order) -> CardRoom | RankMemory | RankFailed | None:
        try:
            match order:
                case MapFile(number, layout, num_blocks):
                    fd = recv_handle(self._control)
                    self.mapped[number] = map_pool(fd, layout, num_blocks, prefault=self._prefault)
                    close(fd)
                case AllocateShare(number, layout, num_blocks) if self._share is not None:
                    made = allocate_share(self._share.narrow(layout), num_blocks, self.device)
                    self.mapped[number], self._files[number] = made.memory, made.fd
                case CountBlocks(layout) if self._share is not None:
                    return room_of_card(self.device, self._share.narrow(layout).bytes_per_block)
                case MeasureMemory(layout, num_blocks):
                    return self._measure(layout, num_blocks)
                case RegisterPool(number, welcome):
                    self.mapped[number] = register_blocking(
                        welcome, lambda pool: _map(pool, welcome, mapping_for(self.device))
                    )
        except (
            OSError,
            ValueError,
            RuntimeError,
            TransportError,
        ) as error:  # RuntimeError: no memory of a GPU
            return RankFailed(str(error))
        return None


def _map(pool: ExportedPool, welcome: Welcome, mapping: MemoryMapping) -> KVMemory:
    """Map a decode worker's pool, or the share of one of its ranks. Raises OSError, ValueError."""
    if welcome.holders:
        return map_share(pool, welcome, mapping)
    return mapping.map(pool, welcome.layout, welcome.num_blocks)
