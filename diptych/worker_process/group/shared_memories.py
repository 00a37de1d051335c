"""The KV memories of a group, by the number that plans name them with.

Ranks of this host map them. A rank with memories of its own, on a GPU or another host, allocates its share of
each (spread_blocks.py). On GPUs rank 0 has room for its own share alone, too, and a draft model's segment.
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
from typing import Any, TypeVar

import torch

from diptych.engine.kv.kv_memory import KVLayout, KVMemory, SpreadBlocks
from diptych.engine.parallel.card_room import blocks_with_room, room_of_card
from diptych.engine.parallel.communicator import GroupBroken
from diptych.engine.parallel.kv_shares import KVShare
from diptych.worker_process.group.orders import (
    AllocateShare,
    CountBlocks,
    DropMemory,
    MapFile,
    MeasureMemory,
    Order,
    RankFailed,
    RegisterPool,
)
from diptych.worker_process.group.rank_memory import RankMemory, measure_rank, share_cards
from kvtransfer.transports.base import CPU, TransportError, Welcome
from kvtransfer.transports.pool_memory import PoolMemory, allocate_pool, allocate_share

_Own = TypeVar("_Own")


class SharedMemories:
    """Memories of rank 0 that the other ranks have, too, until rank 0 drops them. Any thread may call."""

    def __init__(self, controls: Sequence[tuple[int, Connection[Any, Any]]]) -> None:
        """Take pid and control pipe of each other rank that maps what rank 0 has."""
        self._mapping = len(controls)
        self._controls = list(controls)
        self._spread: Callable[[KVMemory, int], SpreadBlocks] | None = None
        self._held: KVShare | None = None
        self._device = CPU
        self._lock = threading.Lock()
        self._numbers: weakref.WeakKeyDictionary[KVMemory, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count()
        self._dropped: deque[int] = deque()

    def add_holders(
        self,
        controls: Sequence[Connection[Any, Any]],
        spread: Callable[[KVMemory, int], SpreadBlocks],
        held: KVShare | None,
        device: torch.device,
    ) -> None:
        """Take the control connections of ranks with memories of their own, before any memory is made.

        Args:
            spread: returns what reads and writes whole blocks of a memory, of which it gets the number.
            held: share of each block that rank 0 has; None: all that ranks of this host have.
            device: device of rank 0's memories.
        """
        self._controls += [(0, control) for control in controls]
        self._spread, self._held, self._device = spread, held, device

    @property
    def held(self) -> KVShare | None:
        """Share of each block that rank 0's memories have room for; None: whole blocks."""
        return self._held

    def own_layout(self, layout: KVLayout) -> KVLayout:
        """Return the layout of rank 0's blocks, of which all together are those of `layout`."""
        return layout if self._held is None else self._held.narrow(layout)

    def number_of(self, memory: KVMemory) -> int:
        """Return the number of a memory. Raises KeyError for one that is not shared."""
        return self._numbers[memory]

    def layout_of_ranks(self, layout: KVLayout) -> KVLayout:
        """Return the layout of the blocks of which ranks with memories of their own hold shares, or that all
        map: the first have no room for a draft model's keys and values.
        """
        return layout if self._held is None else layout.without_draft()

    def allocate(self, layout: KVLayout, num_blocks: int) -> KVMemory:
        """Allocate zeroed blocks that all ranks have. Raises OSError, GroupBroken, torch.OutOfMemoryError."""
        made = self.allocate_pool(layout, num_blocks)
        if made.fd is not None:
            os.close(made.fd)  # the mappings keep the memory
        return made.memory

    def allocate_pool(self, layout: KVLayout, num_blocks: int) -> PoolMemory:
        """Allocate zeroed blocks that all ranks have, and other processes can map. Raises as `allocate`."""
        if self._held is None:
            pool = allocate_pool(layout, num_blocks, prefault=self._spread is None)
        else:
            own = allocate_share(self.own_layout(layout), num_blocks, self._device)
            begin = self._held.layers.start, self._held.heads.start
            pool = PoolMemory(own.memory.as_share_of(layout, *begin), own.fd)

        def order(number: int, at: int) -> None:
            pid, control = self._controls[at]
            if at >= self._mapping:
                control.send(AllocateShare(number, layout.without_draft(), num_blocks))
                return
            control.send(MapFile(number, layout, num_blocks))
            send_handle(control, pool.file(), pid)

        if why := self._map_everywhere(pool.memory, order):
            raise GroupBroken(why)
        return pool

    def count_blocks(self, layout: KVLayout, utilization: float, recordings: int, temporaries: int) -> int:
        """Return the blocks whose shares the GPUs of all ranks have room for: one book counts for all.

        The last three are as for `blocks_with_room`. Raises GroupBroken.
        """
        assert self._held is not None, "memory of GPUs is counted, which ranks do not share"
        a_block = self.own_layout(layout).bytes_per_block
        own, others = self._answers(
            CountBlocks(layout.without_draft()), lambda: room_of_card(self._device, a_block)
        )
        return blocks_with_room([own, *others], utilization, recordings, temporaries)

    def measure(self, layout: KVLayout, num_blocks: int, weights: int) -> list[RankMemory]:
        """Return what the memory of each process is taken by, this one's first, which has `weights` bytes of
        them, where the worker has `num_blocks` blocks. Raises GroupBroken.
        """
        allocated = sum(
            memory.blocks.nbytes for memory in list(self._numbers) if memory.data.device == self._device
        )
        size = self.own_layout(layout).bytes_per_block * num_blocks
        mine, others = self._answers(
            MeasureMemory(self.layout_of_ranks(layout), num_blocks),
            lambda: measure_rank(self._device, weights, size, min(size, allocated)),
        )
        return share_cards([mine, *others])

    def _answers(self, order: Order, compute: Callable[[], _Own]) -> tuple[_Own, list[Any]]:
        """Send a question to all ranks; return what `compute` returns here meanwhile, and their answers.

        Raises GroupBroken, and what `compute` raises: answers are read even then, or a later order would be
        answered by them.
        """
        answers: list[Any] = []
        try:
            with self._lock:
                for _, control in self._controls:
                    control.send(order)
                try:
                    own = compute()
                finally:
                    answers += [control.recv() for _, control in self._controls]
        except (OSError, EOFError) as error:
            raise GroupBroken(f"a rank is gone: {error!r}") from error
        finally:
            self._flush()
        for answer in answers:
            if isinstance(answer, RankFailed):
                raise GroupBroken(answer.why)
        return own, answers

    def room_for(self, layout: KVLayout, utilization: float, recordings: int, temporaries: int) -> int:
        """Return the bytes of the blocks that `count_blocks` returns. Raises GroupBroken."""
        return self.count_blocks(layout, utilization, recordings, temporaries) * layout.bytes_per_block

    def register(self, memory: KVMemory, welcomes: Sequence[Welcome]) -> None:
        """Have each rank register with a decode worker by its own welcome, and map the pool that is `memory`.

        Raises TransportError.
        """

        def order(number: int, at: int) -> None:
            self._controls[at][1].send(RegisterPool(number, welcomes[at]))

        if self._mapping < len(self._controls) and not all(one.holders for one in welcomes):
            raise TransportError("ranks of this worker have memories of their own, and map no whole blocks")
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
