"""Mapped memories between the ranks of two groups of one host, the decode worker's end.

    admitted    a writer with a number, and a token for each process that has something for one of the ranks
    mapped      every such pair has registered, and this process knows it: now it may ask for blocks
    pushed      each rank takes the digests of its shares from its own memory; all together are the block's
    dead        no pair is left of which the rank has not seen the source's end

Each rank holds a pidfd of every process that writes to its memory, and kills it at a fence. So a writer is
dead when all its processes that could write are, wherever that was seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from diptych.engine.parallel.kv_routes import Holders, Routes, kv_routes, within
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports.base import KVHolder, Locality, ReceiverHooks, TransportError
from kvtransfer.transports.cuda_ipc import NAME, CudaIpcReceiver
from kvtransfer.transports.memory_mapping import MemoryMapping
from kvtransfer.transports.pool_memory import PoolMemory
from kvtransfer.transports.rank_data import joined_digest
from kvtransfer.transports.share_mapping import (
    CheckRun,
    MappedRanks,
    SourceDied,
    SourceEvent,
    SourceMapped,
    source_name,
    source_token,
)
from kvtransfer.transports.share_offer import ShareOffer
from kvtransfer.transports.tcp_by_rank import can_go_by_rank, holders_of, mapped_ranks

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Writer:
    """Prefill worker whose ranks map memories of this one."""

    number: int
    id: WriterId
    routes: Routes
    live: set[tuple[int, int]] = field(default_factory=set)
    """Pairs (source, holder) that are mapped."""


class IpcByRankReceiver:
    """End of the decode worker, which has whole blocks go by `whole` where both workers are one process."""

    name = NAME
    in_place = False

    def __init__(self, pool: PoolMemory, mapping: MemoryMapping, hooks: ReceiverHooks) -> None:
        memory = pool.memory
        self._layout, self._mapping, self._hooks = memory.layout, mapping, hooks
        self._ranks = mapped_ranks(memory)
        self._whole = CudaIpcReceiver(pool, mapping, hooks) if self._ranks is None else None
        self._holders = holders_of(memory)
        self._secret = secrets.token_bytes(32)
        self._offer = ShareOffer(pool, mapping, 0, self._secret, lambda event: self._on_event(0, event))
        self._endpoints: list[str] = []
        self._numbers = itertools.count(1)
        self._writers: dict[int, _Writer] = {}
        self._checks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen, at the other ranks as well. Raises OSError."""
        if self._whole is not None:
            await self._whole.start()
        await self._offer.start()
        self._endpoints = [self._offer.endpoint]
        if self._ranks is None:
            return
        loop = asyncio.get_running_loop()

        def on_event(holder: int, event: SourceEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: this worker ends
                loop.call_soon_threadsafe(self._on_event, holder, event)

        try:
            for endpoint in self._ranks.offer(self._secret, on_event):
                self._endpoints.append(await asyncio.wrap_future(endpoint))
        except TransportError as error:
            raise OSError(str(error)) from error

    @property
    def endpoint(self) -> str:
        """Abstract name of the socket behind an @, for whole blocks where these can go."""
        return self._offer.endpoint if self._whole is None else self._whole.endpoint

    def unreachable_reason(self, writer: Locality) -> str | None:
        """Return why a writer there cannot map the memories, None if it can."""
        return self._mapping.unreachable_reason(writer, in_place=False)

    def unreachable_holders(self, holders: Holders, pids: Sequence[int]) -> str | None:
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
        known = self._find(writer)
        if known is None:
            number = next(self._numbers)
            known = self._writers[number] = _Writer(number, writer, kv_routes(holders, self._holders))
        found = []
        for shares, endpoint in zip(self._holders, self._endpoints, strict=True):
            tokens = [
                source_token(self._secret, known.number, source, pid) for source, pid in enumerate(pids)
            ]
            found.append(KVHolder(tuple(shares), endpoint, tuple(tokens)))
        return found

    def registered(self, writer: WriterId) -> bool:
        """Return True if all processes of this writer have mapped what they write, and none is dead."""
        known = self._find(writer)
        if known is not None:
            return known.live == set(known.routes)
        return self._whole is not None and self._whole.registered(writer)

    def fence(self, writer: WriterId) -> None:
        """Have every rank kill the processes that map its memory; `dead` follows."""
        known = self._find(writer)
        if known is None:
            if self._whole is not None:
                self._whole.fence(writer)
            return
        self._fence_everywhere(known)

    def _fence_everywhere(self, writer: _Writer) -> None:
        self._offer.fence(writer.number)
        for holder in range(1, len(self._holders)):
            self._others.fence_writer(holder, writer.number)

    def pushed(self, writer: WriterId, ref: GrantRef, first: int, count: int) -> None:
        """Check announced blocks at every rank; `arrived` or `corrupt` follows, unless the grant ends."""
        known = self._find(writer)
        if known is None:
            if self._whole is not None:
                self._whole.pushed(writer, ref, first, count)
            return
        blocks = self._hooks.destinations(writer, ref, range(first, first + count))
        if blocks:
            self._keep(self._check(known, ref, first, tuple(blocks)))

    def link_lost(self, writer: WriterId) -> None:
        """Forget a writer of which no process maps anything.

        Of any other a broken stream proves nothing: processes may still write. A process that registers by an
        earlier welcome's token is never noted, and so never hears that it is registered.
        """
        known = self._find(writer)
        if known is not None and not known.live:
            del self._writers[known.number]

    async def close(self) -> None:
        """Stop listening and forget the writers; the other ranks end with this process."""
        if self._whole is not None:
            await self._whole.close()
        for check in self._checks:
            check.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)
        await self._offer.close()

    # -- sources

    @property
    def _others(self) -> MappedRanks:
        assert self._ranks is not None, "this worker has other ranks"
        return self._ranks

    def _find(self, writer: WriterId) -> _Writer | None:
        return next((known for known in self._writers.values() if known.id == writer), None)

    def _on_event(self, holder: int, event: SourceEvent) -> None:
        number, source = event.source.incarnation, int(event.source.worker_id)
        known = self._writers.get(number)
        if isinstance(event, SourceMapped):
            if known is not None:  # else it is dead, and the source hears nothing more
                known.live.add((source, holder))
                self._note(holder, source_name(number, source))
            return
        assert isinstance(event, SourceDied)
        if known is None:
            return
        known.live.discard((source, holder))
        if not known.live:
            del self._writers[number]
            self._fence_everywhere(known)  # its tokens are void: no process of it comes any more
            self._hooks.dead(known.id)

    def _note(self, holder: int, source: WriterId) -> None:
        if holder:
            self._others.note_source(holder, source)
        else:
            self._offer.note(source)

    # -- checks

    def _keep(self, check: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(check)
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _check(self, writer: _Writer, ref: GrantRef, first: int, blocks: tuple[int, ...]) -> None:
        """Have the ranks take digests. Those of blocks with another owner by then are of no open grant."""
        waiting: dict[int, asyncio.Future[list[bytes]]] = {}
        for holder, (held,) in enumerate(self._holders):
            sources = tuple(
                (source, pieces if not holder else tuple(within(piece, held) for piece in pieces))
                for (source, target), pieces in writer.routes.items()
                if target == holder
            )
            run = CheckRun(writer.number, ref, first, blocks, sources)
            if holder:
                waiting[holder] = asyncio.wrap_future(self._others.check_shares(holder, run))
            else:
                waiting[holder] = asyncio.ensure_future(self._offer.check(run))
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
