"""The memory of one decode rank, offered to the ranks of prefill workers that write to it.

    registered  a source showed its token, got the handle and a page of flags, and mapped both; this process
                holds a pidfd of it from before it could write
    noted       rank 0 knows of it: only now the source hears that it is registered, and so asks for blocks
    checked     rank 0 says which blocks were written: the flags must say so too, and the digests are of the
                bytes in this memory
    dead        the pidfd is readable: no store of that source can come any more, which rank 0 is told

So rank 0 knows of every process that may write to any rank's memory before it grants a block to its worker.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from kvtransfer.protocol.messages import WriterId
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.blocking import BlockingThread
from kvtransfer.transports.fd_passing import RegistrationSocket
from kvtransfer.transports.memory_mapping import ExportedPool, Flags, MemoryMapping
from kvtransfer.transports.pool_memory import PoolMemory
from kvtransfer.transports.rank_data import share_digest
from kvtransfer.transports.registered_writers import MappingProcess, RegisteredWriters
from kvtransfer.transports.share_mapping import (
    SOURCE_TOKEN_BYTES,
    CheckRun,
    SourceDied,
    SourceEvent,
    SourceMapped,
    read_source_token,
    source_name,
)

_NOTED_S = 2.0
"""Seconds in which rank 0 must have noted a source."""


class ShareOffer:
    """Memory of holder `holder`, on one event loop.

    Args:
        secret: maker of the tokens.
        tell: takes what sources do.
    """

    def __init__(
        self,
        pool: PoolMemory,
        mapping: MemoryMapping,
        holder: int,
        secret: bytes,
        tell: Callable[[SourceEvent], None],
    ) -> None:
        self._pool, self._mapping, self._holder, self._tell = pool, mapping, holder, tell
        self._secret = secret
        self._kept = RegisteredWriters(self._died)
        self._fenced: set[int] = set()
        self._registering: Counter[WriterId] = Counter()
        """Registrations of each source that are not over."""
        self._flags: dict[WriterId, Flags] = {}
        """Pages of sources that register, or map the memory. Who takes one out closes it."""
        self._mapped: set[WriterId] = set()
        """Sources that map the memory, until they are dead."""
        self._noted: dict[WriterId, asyncio.Event] = {}
        self._thread = BlockingThread("verify-shares")
        self._socket = RegistrationSocket(self._export, self, SOURCE_TOKEN_BYTES)

    async def start(self) -> None:
        """Listen. Raises OSError."""
        await self._socket.start()

    @property
    def endpoint(self) -> str:
        """Abstract name of the socket behind an @."""
        return self._socket.endpoint

    def note(self, source: WriterId) -> None:
        """Let a source go on: rank 0 knows that it may write here."""
        if (event := self._noted.get(source)) is not None:
            event.set()

    def fence(self, writer: int) -> None:
        """Kill the sources of a writer; `SourceDied` of each follows. No other one registers any more."""
        self._fenced.add(writer)
        for source in list(self._mapped):
            if source.incarnation == writer:
                self._kept.fence(source)

    def has_sources_of(self, writer: int) -> bool:
        """Return whether a process of this writer maps the memory."""
        return any(source.incarnation == writer for source in self._mapped)

    async def check(self, run: CheckRun) -> list[bytes]:
        """Return the digests of all sources' shares of each block. Raises TransportError, RuntimeError."""
        upto = run.first + len(run.block_ids)
        by_source = []
        for source, pieces in run.sources:
            flags = self._flags.get(source_name(run.writer, source))
            if flags is None or not flags.written(run.ref, upto):
                raise TransportError("a rank announced blocks that it has not written")
            memory = self._pool.memory
            hashes = await self._thread.run(
                self._mapping.share_hashes, memory, run.block_ids, pieces, run.ref, run.first
            )
            by_source.append([
                share_digest(run.ref, index, source, self._holder, hashed)
                for index, hashed in enumerate(hashes, run.first)
            ])  # fmt: skip
        return [digest for block in zip(*by_source, strict=True) for digest in block]

    async def close(self) -> None:
        """Stop listening and forget the sources; their pages stay theirs."""
        await self._socket.close()
        self._kept.close()
        self._thread.stop()
        self._mapped.clear()
        for source in list(self._flags):
            self._drop_flags(source)

    # -- registration

    def take(self, token: bytes, pid: int) -> WriterId:
        """Return the source that the process `pid` registers as. Raises TransportError."""
        source = read_source_token(self._secret, token, pid)
        if source is None or source.incarnation in self._fenced:
            raise TransportError("an unknown token, or that of a writer that was fenced")
        self._registering[source] += 1
        return source

    async def keep(self, source: WriterId, process: MappingProcess) -> None:
        """Register a source, once rank 0 knows of it. Raises TransportError."""
        self._mapped.add(source)
        self._kept.keep(source, process)
        noted = self._noted[source] = asyncio.Event()
        self._tell(SourceMapped(source))
        try:
            await asyncio.wait_for(noted.wait(), _NOTED_S)
        except TimeoutError as error:
            raise TransportError("rank 0 of the decode worker does not answer") from error
        finally:
            self._noted.pop(source, None)
            if source.incarnation in self._fenced:  # while it mapped the memory
                self._kept.fence(source)

    def registration_over(self, source: WriterId) -> None:
        """Close the page of a source that did not come to map it."""
        self._registering[source] -= 1
        if not self._registering[source]:
            del self._registering[source]
            if source not in self._mapped:
                self._drop_flags(source)

    def _export(self, source: WriterId) -> ExportedPool:
        """Return what a source maps, from a thread."""
        exported = self._mapping.export(self._pool)
        # A process that registers again keeps its page, whose words name their grants.
        if (flags := self._flags.get(source)) is None:
            made = Flags.create(self._pool.memory.num_blocks)
            if (flags := self._flags.setdefault(source, made)) is not made:
                made.close()
        if source not in self._registering and source not in self._mapped:
            self._drop_flags(source)  # it was given up before there was a page
            raise TransportError("the registration was given up")
        return ExportedPool(exported.handle, [flags.fd, *exported.fds])

    def _drop_flags(self, source: WriterId) -> None:
        if (flags := self._flags.pop(source, None)) is not None:
            flags.close()

    def _died(self, source: WriterId) -> None:
        self._mapped.discard(source)
        self._drop_flags(source)
        self._tell(SourceDied(source))
