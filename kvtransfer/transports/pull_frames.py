"""Pulls by frames: a prefill worker reads the cached prefix of its grants over a socket of its own.

    writer → token, then requests   slot u32, generation u64, first index u32, count u32
    decode → frames                 slot u32, generation u64, index u32, length u32, digest, bytes

A request for no blocks withdraws the one before. The decode worker answers block by block, each only while
its grant is open, and ends with a frame of length 0 if it is not. Frames are read into a staging buffer, and
copied into scratch only if their pull is open and lacks the block, and if its bytes match the digest, which
binds them to grant, direction and index. So nothing that comes late touches scratch, and closing the socket
costs the pulls alone: it is no fence.

Blocks on a GPU pass through host memory.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from diptych.engine.kv.kv_memory import KVMemory
from diptych.runtime.failpoints import reach
from diptych.runtime.internal_tls import InternalTls
from diptych.runtime.send_queue import SendQueue
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.protocol.pull_table import Pull, PullTable
from kvtransfer.transports.base import TransportError, Welcome
from kvtransfer.transports.blocking import queued_work
from kvtransfer.transports.data_connection import DataConnection
from kvtransfer.transports.data_listener import DataListener, DataSocket
from kvtransfer.transports.failpoints import damage_payload
from kvtransfer.transports.host_blocks import (
    DIGEST_BYTES,
    fetch_block,
    pulled_block_digest,
    write_block,
)

_REQUEST = struct.Struct("<IQII")
_HEADER = struct.Struct(f"<IQII{DIGEST_BYTES}s")
_ACCEPTED = b"+"
_NO_DIGEST = bytes(DIGEST_BYTES)
MAX_REQUESTS = 1024
"""Most requests of one writer that wait to be answered: it has a pull for each prompt at most."""

PrefixBlocks = Callable[[WriterId, int, int, int], "tuple[GrantRef, int] | None"]
"""`(writer, slot, generation, index)` to the grant and the block in the pool; None: it may not be read."""


class PullServer:
    """End of the decode worker, one for all its writers.

    Args:
        prefix_block: finds the blocks that may be read at this moment.
        exchanged: see `ReceiverHooks.exchanged`.
    """

    def __init__(
        self,
        host: str,
        memory: KVMemory,
        prefix_block: PrefixBlocks,
        tls: InternalTls | None = None,
        exchanged: Callable[[WriterId, KVMemory], KVMemory] = lambda writer, memory: memory,
    ) -> None:
        def open_reader(writer: WriterId, connection: DataSocket) -> _RequestReader:
            return _RequestReader(writer, connection, exchanged(writer, memory), prefix_block)

        self._listener = DataListener(host, open_reader, lambda writer: None, reusable_tokens=True, tls=tls)

    async def start(self) -> None:
        """Listen on a free port. Raises OSError."""
        await self._listener.start()

    @property
    def endpoint(self) -> str:
        """Address as host:port."""
        return self._listener.endpoint

    def admit(self, writer: WriterId) -> bytes:
        """Let the process that shows the returned token read as `writer`, until it is admitted anew."""
        return self._listener.admit(writer)

    def end(self, writer: WriterId) -> None:
        """Send this writer nothing more, and admit it no more."""
        self._listener.expel(writer)

    async def close(self) -> None:
        """Stop listening and end every socket."""
        await self._listener.close()


class _RequestReader:
    """Reader of one writer's requests; a task answers them in order."""

    def __init__(
        self, writer: WriterId, connection: DataSocket, memory: KVMemory, prefix_block: PrefixBlocks
    ) -> None:
        self._writer, self._connection, self._memory = writer, connection, memory
        self._prefix_block = prefix_block
        self._buffer = memoryview(bytearray(_REQUEST.size))
        self._requests: deque[tuple[int, int, int, int]] = deque()
        self._withdrawn: tuple[int, int] | None = None
        """Slot and generation of the request that is being answered, once it was withdrawn."""
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._serve())

    def greeting(self) -> bytes:
        return _ACCEPTED

    def first_buffer(self) -> memoryview:
        return self._buffer

    def buffer_filled(self) -> memoryview:
        slot, generation, first, count = _REQUEST.unpack(self._buffer)
        if count:
            if len(self._requests) >= MAX_REQUESTS:
                raise TransportError(f"prefill worker {self._writer.worker_id} sent too many pulls at once")
            self._requests.append((slot, generation, first, count))
            self._wake.set()
        else:
            self._withdrawn = slot, generation
            kept = [request for request in self._requests if request[:2] != self._withdrawn]
            self._requests = deque(kept)
        return self._buffer

    def ended(self) -> None:
        self._task.cancel()

    async def _serve(self) -> None:
        try:
            while True:
                while self._requests:
                    self._withdrawn = None
                    await self._answer(*self._requests.popleft())
                self._wake.clear()
                await self._wake.wait()
        except TransportError:
            self._connection.end()

    async def _answer(self, slot: int, generation: int, first: int, count: int) -> None:
        for index in range(first, first + count):
            if self._withdrawn == (slot, generation):
                return
            frame = await self._read(slot, generation, index)
            if frame is None:
                await self._connection.send(_HEADER.pack(slot, generation, index, 0, _NO_DIGEST))
                return
            payload, digest = frame
            reach("decode.pull")
            header = _HEADER.pack(slot, generation, index, len(payload), digest)
            await self._connection.send(header, payload)

    async def _read(self, slot: int, generation: int, index: int) -> tuple[bytes, bytes] | None:
        """Return a copy of a block and its digest; None unless its grant is open now, the copy included."""
        found = self._prefix_block(self._writer, slot, generation, index)
        if found is None:
            return None
        ref, block = found
        payload = await fetch_block(self._memory, block, queued_work(self._memory))
        # Generations are never used again: a grant that is still open has held the block all the time.
        if self._prefix_block(self._writer, slot, generation, index) != found:
            return None
        copy = bytes(damage_payload(payload))
        return copy, pulled_block_digest(ref, index, payload)


class FramePullChannel:
    """End of the prefill worker: one socket to one decode worker, whose frames go to the pulls of `table`."""

    def __init__(self, connection: DataConnection, memory: KVMemory, table: PullTable) -> None:
        self._connection, self._memory, self._table = connection, memory, table
        self._staging = memoryview(bytearray(memory.layout.bytes_per_block))
        self._header = memoryview(bytearray(_HEADER.size))
        self._requests: SendQueue[bytes] = SendQueue()
        self._writer = asyncio.create_task(self._write_requests())
        self._reader = asyncio.create_task(self._read_frames())
        self.broken = False
        """True if the other end is gone, or sent what no decode worker sends."""

    @classmethod
    async def open(cls, welcome: Welcome, memory: KVMemory, table: PullTable) -> FramePullChannel:
        """Connect and register; frames are copied into `memory`. Raises TransportError."""
        there = replace(welcome, endpoint=welcome.pull_endpoint, token=welcome.pull_token)
        connection = await DataConnection.open(there, len(_ACCEPTED), counts=False)
        return cls(connection, memory, table)

    def request(self, pull: Pull) -> None:
        """Ask for the blocks of a pull."""
        ref = pull.ref
        self._requests.put(_REQUEST.pack(ref.slot, ref.generation, pull.first, len(pull.block_ids)))

    async def withdraw(self, pull: Pull) -> None:
        """Ask for no more blocks of a pull; those on their way find it ended."""
        self._requests.put(_REQUEST.pack(pull.ref.slot, pull.ref.generation, 0, 0))

    def close(self) -> None:
        """Read nothing more, from this moment on."""
        if self._reader.done() and self.broken:
            return
        self.broken = True
        self._requests.close()
        self._writer.cancel()
        self._reader.cancel()

    async def _write_requests(self) -> None:
        try:
            while requests := await self._requests.take():
                await self._connection.send(b"".join(requests))
        except TransportError:
            self._reader.cancel()

    async def _read_frames(self) -> None:
        try:
            while True:
                await self._connection.receive_into(self._header)
                slot, generation, index, length, digest = _HEADER.unpack(self._header)
                if length not in (0, self._staging.nbytes):
                    raise TransportError(f"the decode worker sent a block of {length} bytes")
                if length:
                    await self._connection.receive_into(self._staging)
                self._take(slot, generation, index, digest if length else None)
        except TransportError:
            pass  # `broken` reports it
        finally:
            self.broken = True
            self._requests.close()
            self._connection.close()
            self._table.cut_all()

    def _take(self, slot: int, generation: int, index: int, digest: bytes | None) -> None:
        pull = self._table.find(slot, generation)
        if pull is None:
            return
        if digest is None:
            pull.cut()
            return
        block = pull.destination(index)
        if block is None:
            return
        if pulled_block_digest(pull.ref, index, self._staging) != digest:
            pull.cut()
            return
        write_block(self._memory, block, self._staging)
        reach("prefill.pulled")
        pull.arrived(index)
        if index == pull.first + len(pull.block_ids) - 1:
            pull.cut()  # frames come in order: what is missing now had a damaged header
