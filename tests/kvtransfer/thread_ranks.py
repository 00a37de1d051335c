"""Ranks with memories of their own that are threads: real connections, and the program's own service."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.parallel.kv_routes import Holders
from diptych.engine.parallel.kv_shares import KVShare
from diptych.worker_process.group.mapping_service import MappingService
from diptych.worker_process.group.orders import ReadShare
from diptych.worker_process.group.remote_rank import RemoteRank
from diptych.worker_process.group.rendezvous import KINDS, Joined
from diptych.worker_process.group.share_memory import ShareMemory
from diptych.worker_process.group.share_service import ShareService
from diptych.worker_process.group.spread_blocks import SpreadShares
from kvtransfer.transports.base import CPU, Welcome, host_id
from kvtransfer.transports.fd_passing import register
from kvtransfer.transports.in_place_by_rank import map_share, rank_welcome
from kvtransfer.transports.memory_mapping import HostMapping
from kvtransfer.transports.pool_memory import PoolMemory, allocate_share
from kvtransfer.transports.rank_data import share_hash

HERE = "127.0.0.1"


class GroupOver(Exception):
    """End of a group, which ends its processes elsewhere."""


def fail(error: BaseException) -> NoReturn:
    raise GroupOver from error


class ThreadRank:
    """A rank with a memory of its own.

    Args:
        share: what it holds of blocks of `layout`.
        holder: its number among those with memories of their own.
        in_step: its plans wait until `carry_out_next`.
        damages: it answers one question for a share, with other bytes than their digest's.
        mapped: memory of another worker's rank that it has in place of its own.
    """

    def __init__(
        self,
        share: KVShare,
        layout: KVLayout,
        num_blocks: int,
        *,
        holder: int = 1,
        in_step: bool = False,
        damages: bool = False,
        mapped: KVMemory | None = None,
    ) -> None:
        if mapped is None:
            pool = allocate_share(share.narrow(layout), num_blocks, CPU)
            self._files = [pool.file()]
        else:
            pool = PoolMemory(mapped, None)
            self._files = []
        self.memory = pool.memory
        pairs = {kind: socket.socketpair() for kind in KINDS}
        ends = {kind: Connection(ours.detach()) for kind, (ours, _) in pairs.items()}
        self._closing = False
        self.rank = RemoteRank(Joined(HERE, holder, ends), self._lost)
        self._sockets = [theirs for _, theirs in pairs.values()]
        self._theirs = {kind: Connection(os.dup(theirs.fileno())) for kind, (_, theirs) in pairs.items()}
        self.own = ShareMemory({0: self.memory})
        self.mappings = MappingService(holder, self.own, lambda number: pool, HostMapping(host_id()))
        self.service = ShareService(self._theirs["shares"], HERE, holder, self.own, self.mappings)
        serving = [self._damage if damages else lambda: self.own.answer(self._theirs["blocks"])]
        serving += [self.service.serve, *([] if in_step else [self._carry_out])]
        self._threads = [
            threading.Thread(target=self._until_gone, args=(serve,), daemon=True) for serve in serving
        ]
        for thread in self._threads:
            thread.start()

    def carry_out_next(self) -> None:
        """Carry out the next write or copy."""
        plans: Connection[Any, Any] = self._theirs["plans"]
        self.own.carry_out(plans.recv())

    def close(self) -> None:
        """End the rank, once."""
        if self._closing:
            return
        self._closing = True
        for theirs in self._sockets:
            with contextlib.suppress(OSError):
                theirs.shutdown(socket.SHUT_RDWR)
            theirs.close()
        for thread in self._threads:
            thread.join()
        self.mappings.close()
        while self._files:
            os.close(self._files.pop())
        # Threads that wait for orders keep this object: other tests count mappings of pools.
        self.rank.shares.on_event = None
        self.rank.shares.on_source.clear()
        del self.memory, self.own, self.service, self.mappings

    def _lost(self, error: BaseException) -> Any:
        """Raise for who asks for something; a thread that serves the connection sees the end of this test."""
        if not (self._closing and threading.current_thread().name.startswith(("shares-", "plans-"))):
            fail(error)

    def _until_gone(self, serve: Callable[[], object]) -> None:
        with contextlib.suppress(OSError, EOFError):
            serve()

    def _carry_out(self) -> None:
        while True:
            self.carry_out_next()

    def _damage(self) -> None:
        blocks: Connection[Any, Any] = self._theirs["blocks"]
        asked: ReadShare = blocks.recv()
        payload = bytearray(self.memory.block_bytes(asked.block))
        blocks.send_bytes(share_hash(payload))
        payload[5] ^= 1
        blocks.send_bytes(payload)


@contextlib.contextmanager
def spread_over_threads(memory: KVMemory, holders: Holders) -> Iterator[Sequence[ThreadRank]]:
    """Give all but the first of these shares of `memory` to ranks of their own."""
    ranks = [
        ThreadRank(share, memory.layout, memory.num_blocks, holder=holder)
        for holder, (share,) in enumerate(holders[1:], start=1)
    ]
    others = [(one.rank, share) for one, (share,) in zip(ranks, holders[1:], strict=True)]
    memory.spread = SpreadShares(memory, 0, holders[0], others)
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def own_pool(layout: KVLayout, num_blocks: int, held: KVShare) -> PoolMemory:
    """Return the memory of a rank 0 that has room for its share alone."""
    pool = allocate_share(held.narrow(layout), num_blocks, CPU)
    return PoolMemory(pool.memory.as_share_of(layout, held.layers.start, held.heads.start), pool.fd)


class ThreadWriters:
    """What a client knows of a group with these holders, all of this process; see `WriterRanks`."""

    def __init__(self, holders: Holders) -> None:
        self.holders = holders
        self.pids = [os.getpid()] * (len(holders) - 1)
        self.devices = [""] * len(holders)
        self._mapping: list[ThreadRank] = []
        """Ranks that have mapped a pool."""

    async def map_pool(self, memory: KVMemory, welcome: Welcome, tokens: Sequence[bytes]) -> None:
        """Map each rank's share of a decode worker's blocks."""
        others = []
        for number, (share,) in enumerate(self.holders[1:], start=1):
            own = rank_welcome(welcome, number)
            mapped = await register(own, lambda pool, own=own: map_share(pool, own, HostMapping(host_id())))  # type: ignore[misc]
            rank = ThreadRank(share, memory.layout, memory.num_blocks, holder=number, mapped=mapped)
            self._mapping.append(rank)
            others.append((rank.rank, share))
        memory.spread = SpreadShares(memory, 0, self.holders[0], others)

    def close(self) -> None:
        """End the ranks."""
        for rank in self._mapping:
            rank.close()
        self._mapping.clear()
