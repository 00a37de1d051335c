"""Prefill workers whose ranks map memories of this decode worker's ranks: who may, who does, and who is dead.

    admitted    a writer with a number, and a token for each process that has something for one of the ranks
    mapped      every such pair has registered, and this process knows it: now it may ask for blocks
    dead        no pair is left of which the rank has not seen the source's end

Each rank holds a pidfd of every process that maps its memory, and kills it at a fence. So a writer is dead
when all its processes that could write are, wherever that was seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diptych.engine.parallel.kv_routes import Holders, Routes
from kvtransfer.protocol.messages import WriterId
from kvtransfer.transports.base import KVHolder, TransportError
from kvtransfer.transports.memory_mapping import MemoryMapping
from kvtransfer.transports.pool_memory import PoolMemory
from kvtransfer.transports.share_mapping import (
    MappedRanks,
    SourceDied,
    SourceEvent,
    SourceMapped,
    source_name,
    source_token,
)
from kvtransfer.transports.share_offer import ShareOffer
from kvtransfer.transports.tcp_by_rank import holders_of, mapped_ranks

_numbers = itertools.count(1)
"""Numbers of writers, each good once in this process: a rank may offer its memory to two transports."""


@dataclass(eq=False)
class RankWriter:
    """Prefill worker whose ranks map memories of this one."""

    number: int
    id: WriterId
    routes: Routes
    live: set[tuple[int, int]] = field(default_factory=set)
    """Pairs (source, holder) that are mapped."""

    @property
    def registered(self) -> bool:
        """True if all its processes have mapped what they write, and none is dead."""
        return self.live == set(self.routes)


class RankWriters:
    """The writers of one transport.

    Args:
        pool: blocks of rank 0, whose spread has the other ranks.
        dead: called when a writer can write no more.
    """

    def __init__(self, pool: PoolMemory, mapping: MemoryMapping, dead: Callable[[WriterId], None]) -> None:
        self.ranks: MappedRanks | None = mapped_ranks(pool.memory)
        """The other ranks; None: this process has whole blocks."""
        self.holders: Holders = holders_of(pool.memory)
        """Shares of each rank's memory."""
        self._dead = dead
        self._secret = secrets.token_bytes(32)
        self.offer = ShareOffer(pool, mapping, 0, self._secret, lambda event: self._on_event(0, event))
        """Offer of this process' own memory."""
        self._endpoints: list[str] = []
        self._writers: dict[int, RankWriter] = {}

    async def start(self) -> None:
        """Listen, at the other ranks as well. Raises OSError."""
        await self.offer.start()
        self._endpoints = [self.offer.endpoint]
        if self.ranks is None:
            return
        loop = asyncio.get_running_loop()

        def on_event(holder: int, event: SourceEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: this worker ends
                loop.call_soon_threadsafe(self._on_event, holder, event)

        try:
            for endpoint in self.ranks.offer(self._secret, on_event):
                self._endpoints.append(await asyncio.wrap_future(endpoint))
        except TransportError as error:
            raise OSError(str(error)) from error

    def admit(self, writer: WriterId, routes: Routes, pids: Sequence[int]) -> list[KVHolder]:
        """Let the processes `pids` of a writer register at the ranks that `routes` give them something for;
        return where each rank is, and all tokens.
        """
        known = self.find(writer)
        if known is None:
            known = RankWriter(next(_numbers), writer, routes)
            self._writers[known.number] = known
        found = []
        for shares, endpoint in zip(self.holders, self._endpoints, strict=True):
            tokens = [
                source_token(self._secret, known.number, source, pid) for source, pid in enumerate(pids)
            ]
            found.append(KVHolder(tuple(shares), endpoint, tuple(tokens)))
        return found

    def find(self, writer: WriterId) -> RankWriter | None:
        """Return a writer that was admitted and is not known to be dead."""
        return next((known for known in self._writers.values() if known.id == writer), None)

    def fence(self, writer: RankWriter) -> None:
        """Have every rank kill the processes that map its memory; `dead` follows."""
        self.offer.fence(writer.number)
        if self.ranks is not None:
            for holder in range(1, len(self.holders)):
                self.ranks.fence_writer(holder, writer.number)

    def link_lost(self, writer: WriterId) -> None:
        """Forget a writer of which no process maps anything.

        Of any other a broken stream proves nothing: processes may still write. A process that registers by an
        earlier welcome's token is never noted, and so never hears that it is registered.
        """
        known = self.find(writer)
        if known is not None and not known.live:
            del self._writers[known.number]

    async def close(self) -> None:
        """Stop listening and forget the writers; the other ranks end with this process."""
        await self.offer.close()

    def _on_event(self, holder: int, event: SourceEvent) -> None:
        number, source = event.source.incarnation, int(event.source.worker_id)
        known = self._writers.get(number)
        if known is None:  # it is dead or another transport's; a source that maps now hears nothing more
            return
        if isinstance(event, SourceMapped):
            known.live.add((source, holder))
            self._note(holder, source_name(number, source))
            return
        assert isinstance(event, SourceDied)
        known.live.discard((source, holder))
        if not known.live:
            del self._writers[number]
            self.fence(known)  # its tokens are void: no process of it comes any more
            self._dead(known.id)

    def _note(self, holder: int, source: WriterId) -> None:
        if holder and self.ranks is not None:
            self.ranks.note_source(holder, source)
        else:
            self.offer.note(source)
