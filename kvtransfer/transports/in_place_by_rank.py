"""Mapped memories in which the ranks of another group compute: no block is copied.

Rank i of a prefill worker maps the memory of the decode worker's rank i, on the same GPU and with the same
share of each block, and writes there what it computes. Registration, fence and proof are those of ranks that
copy (rank_writers.py). `Commit` and `Stopped` come after the step, and a step is over when every rank has
said that its device is done with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.parallel.kv_routes import Holders
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports.base import KVHolder, Locality, ReceiverHooks, Welcome
from kvtransfer.transports.blocking import finished
from kvtransfer.transports.fd_passing import register
from kvtransfer.transports.memory_mapping import ExportedPool, MemoryMapping
from kvtransfer.transports.pool_memory import PoolMemory
from kvtransfer.transports.rank_data import RankBlocks
from kvtransfer.transports.rank_writers import RankWriters
from kvtransfer.transports.shared_memory import ON_GPU
from kvtransfer.transports.tcp_by_rank import can_go_by_rank


class InPlaceByRankReceiver:
    """End of a decode worker whose ranks have memories of their own."""

    name = ON_GPU
    in_place = True

    def __init__(self, pool: PoolMemory, mapping: MemoryMapping, hooks: ReceiverHooks) -> None:
        self._layout, self._mapping = pool.memory.layout, mapping
        spread = pool.memory.spread
        self._devices = spread.devices if isinstance(spread, RankBlocks) else ()
        self._writers = RankWriters(pool, mapping, hooks.dead)

    def unreachable_reason(self, writer: Locality) -> str | None:
        """Return why a writer there cannot map the memories, None if it can."""
        return self._mapping.unreachable_reason(writer, in_place=True)

    def unreachable_holders(
        self, holders: Holders, pids: Sequence[int], devices: Sequence[str] = ()
    ) -> str | None:
        """See `HolderReach.unreachable_holders`."""
        if not can_go_by_rank(self._layout) or len(pids) != len(holders):
            return "ranks that have one memory, or are on other hosts"
        if [tuple(held) for held in holders] != [tuple(held) for held in self._writers.holders]:
            return "ranks with other shares of each block"
        if any(len(held) != 1 for held in holders):
            return "ranks that have one memory"
        if list(devices) != list(self._devices):
            return "ranks on other GPUs"
        return None

    async def start(self) -> None:
        """Listen, at the other ranks as well. Raises OSError."""
        await self._writers.start()

    @property
    def endpoint(self) -> str:
        """Abstract name of the socket of this process behind an @."""
        return self._writers.offer.endpoint

    def admit(self, writer: WriterId, pid: int) -> bytes:
        """Return an empty token: no process writes whole blocks."""
        return b""

    def admit_holders(
        self, writer: WriterId, holders: Holders, pids: Sequence[int] = ()
    ) -> Sequence[KVHolder]:
        """See `HolderReceiver.admit_holders`."""
        routes = {(number, number): tuple(held) for number, held in enumerate(holders)}
        return self._writers.admit(writer, routes, pids)

    def registered(self, writer: WriterId) -> bool:
        """Return True if every process of this writer maps its rank's memory, and none is dead."""
        known = self._writers.find(writer)
        return known is not None and known.registered

    def fence(self, writer: WriterId) -> None:
        """Have every rank kill the process that maps its memory; `dead` follows."""
        if (known := self._writers.find(writer)) is not None:
            self._writers.fence(known)

    def pushed(self, writer: WriterId, ref: GrantRef, first: int, count: int) -> None:
        """Do nothing: the blocks were computed in place."""

    def link_lost(self, writer: WriterId) -> None:
        """See `RankWriters.link_lost`."""
        self._writers.link_lost(writer)

    async def close(self) -> None:
        """Stop listening and forget the writers; the other ranks end with this process."""
        await self._writers.close()


def rank_welcome(welcome: Welcome, number: int) -> Welcome:
    """Return what the process of that number registers with: at its own rank, for that rank's share."""
    holder = welcome.holders[number]
    (held,) = holder.shares
    return replace(
        welcome,
        endpoint=holder.endpoint,
        token=holder.tokens[number],
        layout=held.narrow(welcome.layout),
        tls=None,
    )


def map_share(pool: ExportedPool, welcome: Welcome, mapping: MemoryMapping) -> KVMemory:
    """Map a rank's memory as a registration brought it, whose page of flags is not needed. Raises OSError,
    ValueError.
    """
    return mapping.map(ExportedPool(pool.handle, pool.fds[1:]), welcome.layout, welcome.num_blocks)


async def open_own_share(welcome: Welcome, mapping: MemoryMapping) -> KVMemory:
    """Register this process, rank 0, and map the memory of the decode worker's rank 0, as its share of whole
    blocks. Raises TransportError.
    """
    own = rank_welcome(welcome, 0)
    mapped = await finished(asyncio.ensure_future(register(own, lambda pool: map_share(pool, own, mapping))))
    (held,) = welcome.holders[0].shares
    return mapped.as_share_of(welcome.layout, held.layers.start, held.heads.start)
