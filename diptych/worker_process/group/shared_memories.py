"""The KV memories of a group, by the number that plans name them with.

Ranks of this host map them. A rank of another host allocates its share of each (spread_blocks.py).
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

from diptych.engine.kv.kv_memory import KVLayout, KVMemory, SpreadBlocks
from diptych.engine.parallel.communicator import GroupBroken
from diptych.worker_process.group.orders import (
    AllocateShare,
    DropMemory,
    MapFile,
    Order,
    RankFailed,
    RegisterPool,
)
from kvtransfer.transports.base import TransportError, Welcome
from kvtransfer.transports.pool_memory import allocate_pool


class SharedMemories:
    """Memories of rank 0 that the other ranks have mapped, until rank 0 drops them. Any thread may call."""

    def __init__(self, controls: Sequence[tuple[int, Connection[Any, Any]]]) -> None:
        """Take pid and control pipe of each other rank of this host."""
        self._local = len(controls)
        self._controls = list(controls)
        self._spread: Callable[[KVMemory, int], SpreadBlocks] | None = None
        self._lock = threading.Lock()
        self._numbers: weakref.WeakKeyDictionary[KVMemory, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count()
        self._dropped: deque[int] = deque()

    def add_hosts(
        self,
        controls: Sequence[Connection[Any, Any]],
        spread: Callable[[KVMemory, int], SpreadBlocks],
    ) -> None:
        """Take the control connections of ranks of other hosts, before any memory is made.

        `spread` returns what reads and writes whole blocks of a memory, of which it gets the number.
        """
        self._controls += [(0, control) for control in controls]
        self._spread = spread

    def number_of(self, memory: KVMemory) -> int:
        """Return the number of a memory. Raises KeyError for one that is not shared."""
        return self._numbers[memory]

    def allocate(self, layout: KVLayout, num_blocks: int) -> KVMemory:
        """Allocate zeroed blocks that all ranks map. Raises OSError, GroupBroken."""
        made = allocate_pool(layout, num_blocks, prefault=self._spread is None)
        try:
            self.share(made.memory, made.file())
        finally:
            os.close(made.file())  # the mappings keep the memory
        return made.memory

    def share(self, memory: KVMemory, fd: int) -> None:
        """Have the ranks map `memory`, the blocks of the file `fd`, or allocate their shares of it.

        Raises GroupBroken.
        """

        def order(number: int, at: int) -> None:
            pid, control = self._controls[at]
            if at >= self._local:
                control.send(AllocateShare(number, memory.layout, memory.num_blocks))
                return
            control.send(MapFile(number, memory.layout, memory.num_blocks))
            send_handle(control, fd, pid)

        if why := self._map_everywhere(memory, order):
            raise GroupBroken(why)

    def register(self, memory: KVMemory, welcomes: Sequence[Welcome]) -> None:
        """Have each rank register with a decode worker by its own welcome, and map the pool that is `memory`.

        Raises TransportError.
        """

        def order(number: int, at: int) -> None:
            self._controls[at][1].send(RegisterPool(number, welcomes[at]))

        if len(welcomes) != len(self._controls):
            raise TransportError("the decode worker does not let every rank of this worker register")
        if why := self._map_everywhere(memory, order):
            raise TransportError(why)

    def ask(self, order: Order) -> str | None:
        """Have every rank carry out an order that it answers; return which one could not, and why."""
        return self._ask_everywhere(lambda at: self._controls[at][1].send(order))

    def _ask_everywhere(self, send: Callable[[int], None]) -> str | None:
        try:
            with self._lock:
                for at in range(len(self._controls)):
                    send(at)
                answers = [control.recv() for _, control in self._controls]
        except (OSError, EOFError) as error:
            return f"a rank is gone: {error!r}"
        finally:
            self._flush()
        failed = ((number, one) for number, one in enumerate(answers, start=1) if isinstance(one, RankFailed))
        return next((f"rank {number}: {one.why}" for number, one in failed), None)

    def _map_everywhere(self, memory: KVMemory, order: Callable[[int, int], None]) -> str | None:
        """Send an order to map `memory` to each rank; return why one could not."""
        number = next(self._next)
        why = self._ask_everywhere(lambda at: order(number, at))
        self._numbers[memory] = number
        if self._spread is not None:
            memory.spread = self._spread(memory, number)
        weakref.finalize(memory, self._drop, number).atexit = False
        return why

    def _drop(self, number: int) -> None:
        """Have the ranks unmap a memory that was collected here, on whatever thread and at whatever point."""
        self._dropped.append(number)
        self._flush()

    def _flush(self) -> None:
        """Send what was dropped; the holder of the lock does it where another thread is sending."""
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                while self._dropped:
                    number = self._dropped.popleft()
                    for _, control in self._controls:
                        control.send(DropMemory(number))
            except OSError:
                return  # a rank is gone, and this process with it
            finally:
                self._lock.release()
