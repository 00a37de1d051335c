"""Mapped memories between the ranks of two groups of one host, the decode worker's end.

Who may map, and who is dead, is in rank_writers.py. What a writer pushed is checked here: each rank takes the
digests of its shares from its own memory, and all together are the block's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from diptych.engine.parallel.kv_routes import Holders, Routes, kv_routes, within
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports.base import KVHolder, Locality, ReceiverHooks
from kvtransfer.transports.cuda_ipc import NAME, CudaIpcReceiver
from kvtransfer.transports.memory_mapping import MemoryMapping
from kvtransfer.transports.pool_memory import PoolMemory
from kvtransfer.transports.rank_data import joined_digest
from kvtransfer.transports.rank_writers import RankWriter, RankWriters
from kvtransfer.transports.share_mapping import CheckRun
from kvtransfer.transports.tcp_by_rank import can_go_by_rank

_log = logging.getLogger(__name__)


class IpcByRankReceiver:
    """End of the decode worker, which has whole blocks go by `whole` where both workers are one process."""

    name = NAME
    in_place = False

    def __init__(self, pool: PoolMemory, mapping: MemoryMapping, hooks: ReceiverHooks) -> None:
        self._layout, self._mapping, self._hooks = pool.memory.layout, mapping, hooks
        self._writers = RankWriters(pool, mapping, hooks.dead)
        self._ranks, self._holders = self._writers.ranks, self._writers.holders
        self._whole = CudaIpcReceiver(pool, mapping, hooks) if self._ranks is None else None
        self._checks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen, at the other ranks as well. Raises OSError."""
        if self._whole is not None:
            await self._whole.start()
        await self._writers.start()

    @property
    def endpoint(self) -> str:
        """Abstract name of the socket behind an @, for whole blocks where these can go."""
        return self._writers.offer.endpoint if self._whole is None else self._whole.endpoint

    def unreachable_reason(self, writer: Locality) -> str | None:
        """Return why a writer there cannot map the memories, None if it can."""
        return self._mapping.unreachable_reason(writer, in_place=False)

    def unreachable_holders(
        self, holders: Holders, pids: Sequence[int], devices: Sequence[str] = ()
    ) -> str | None:
        """See `HolderReach.unreachable_holders`."""
        if self._goes_whole(holders):
            return None
        if not can_go_by_rank(self._layout) or not holders:
            return "ranks with memories of their own, and blocks that go whole"
        if len(pids) != len(holders) or any(len(held) != 1 for held in (*holders, *self._holders)):
            return "ranks that have one memory, or are on other hosts"
        try:
            kv_routes(holders, self._holders)
        except ValueError as error:
            return str(error)
        return None

    def _goes_whole(self, holders: Holders) -> bool:
        return self._whole is not None and len(holders) <= 1

    def admit(self, writer: WriterId, pid: int) -> bytes:
        """Let a process that writes whole blocks register; return its token, empty where none does."""
        return b"" if self._whole is None else self._whole.admit(writer, pid)

    def admit_holders(
        self, writer: WriterId, holders: Holders, pids: Sequence[int] = ()
    ) -> Sequence[KVHolder]:
        """See `HolderReceiver.admit_holders`."""
        if self._goes_whole(holders):
            return ()
        return self._writers.admit(writer, kv_routes(holders, self._holders), pids)

    def registered(self, writer: WriterId) -> bool:
        """Return True if all processes of this writer have mapped what they write, and none is dead."""
        known = self._writers.find(writer)
        if known is not None:
            return known.registered
        return self._whole is not None and self._whole.registered(writer)

    def fence(self, writer: WriterId) -> None:
        """Have every rank kill the processes that map its memory; `dead` follows."""
        known = self._writers.find(writer)
        if known is not None:
            self._writers.fence(known)
        elif self._whole is not None:
            self._whole.fence(writer)

    def pushed(self, writer: WriterId, ref: GrantRef, first: int, count: int) -> None:
        """Check announced blocks at every rank; `arrived` or `corrupt` follows, unless the grant ends."""
        known = self._writers.find(writer)
        if known is None:
            if self._whole is not None:
                self._whole.pushed(writer, ref, first, count)
            return
        blocks = self._hooks.destinations(writer, ref, range(first, first + count))
        if blocks:
            self._keep(self._check(known, ref, first, tuple(blocks)))

    def link_lost(self, writer: WriterId) -> None:
        """See `RankWriters.link_lost`; of whole blocks a broken stream proves nothing."""
        self._writers.link_lost(writer)

    async def close(self) -> None:
        """Stop listening and forget the writers; the other ranks end with this process."""
        if self._whole is not None:
            await self._whole.close()
        for check in self._checks:
            check.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)
        await self._writers.close()

    # -- checks

    def _keep(self, check: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(check)
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _check(self, writer: RankWriter, ref: GrantRef, first: int, blocks: tuple[int, ...]) -> None:
        """Have the ranks take digests. Those of blocks with another owner by then are of no open grant."""
        waiting: dict[int, asyncio.Future[list[bytes]]] = {}
        for holder, (held,) in enumerate(self._holders):
            sources = tuple(
                (source, pieces if not holder else tuple(within(piece, held) for piece in pieces))
                for (source, target), pieces in writer.routes.items()
                if target == holder
            )
            run = CheckRun(writer.number, ref, first, blocks, sources)
            if holder and self._ranks is not None:
                waiting[holder] = asyncio.wrap_future(self._ranks.check_shares(holder, run))
            else:
                waiting[holder] = asyncio.ensure_future(self._writers.offer.check(run))
        await asyncio.gather(*waiting.values(), return_exceptions=True)
        try:
            found = {holder: check.result() for holder, check in waiting.items()}
        except Exception as error:  # of any kind: blocks that could not be checked are not used
            _log.error("blocks of prefill worker %s cannot be checked: %r", writer.id.worker_id, error)
            self._hooks.corrupt(writer.id, ref)
            return
        digests = [self._joined(writer.routes, found, at) for at in range(len(blocks))]
        self._hooks.arrived(writer.id, ref, first, digests)

    def _joined(self, routes: Routes, found: dict[int, list[bytes]], at: int) -> bytes:
        """Return the digest of the block at that place from those of its shares."""
        of_holder = {holder: [s for s, target in routes if target == holder] for holder in found}
        by_pair = {
            (source, holder): found[holder][at * len(sources) + place]
            for holder, sources in of_holder.items()
            for place, source in enumerate(sources)
        }
        return joined_digest([by_pair[pair] for pair in routes])
