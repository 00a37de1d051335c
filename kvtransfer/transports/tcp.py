"""TCP: blocks are copied over a data socket of their own and checked before they touch the pool.

    frame = slot u32, generation u64, index u32, length u32, digest, bytes

A frame is read into a staging buffer. It is copied into its block only if its grant is open at this moment
and its bytes match the digest, which binds them to request, grant and index. So stale or damaged data never
reaches the pool, and closing the socket is proof that nothing more can. Where workers have
certificates (--internal-tls) frames are encrypted.
"""

from __future__ import annotations

import struct

from diptych.engine.kv.kv_memory import KVMemory
from diptych.runtime.internal_tls import InternalTls
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports.base import ReceiverHooks, Run, StillGranted, TransportError, Welcome
from kvtransfer.transports.data_connection import DataConnection
from kvtransfer.transports.data_listener import DataSocket, SocketReceiver
from kvtransfer.transports.failpoints import damage_payload, damage_place, truncate_payload
from kvtransfer.transports.host_blocks import DIGEST_BYTES, block_digest, fetch_block, write_block

NAME = "tcp"
_HEADER = struct.Struct(f"<IQII{DIGEST_BYTES}s")
_ACCEPTED = b"+"


def tcp_receiver(
    host: str, memory: KVMemory, hooks: ReceiverHooks, tls: InternalTls | None = None
) -> SocketReceiver:
    """Make the end of the decode worker, which copies frames into `memory`."""

    def open_reader(writer: WriterId, connection: DataSocket) -> _FrameReader:
        return _FrameReader(writer, connection, hooks.exchanged(writer, memory), hooks)

    return SocketReceiver(NAME, host, open_reader, hooks, tls=tls)


class _FrameReader:
    """Reader of headers and payloads in turn."""

    def __init__(
        self, writer: WriterId, connection: DataSocket, memory: KVMemory, hooks: ReceiverHooks
    ) -> None:
        self._writer, self._connection, self._memory, self._hooks = writer, connection, memory, hooks
        self._header = memoryview(bytearray(_HEADER.size))
        self._staging = memoryview(bytearray(memory.layout.bytes_per_block))
        self._frame: tuple[int, int, int, bytes] | None = None

    def greeting(self) -> bytes:
        return _ACCEPTED

    def first_buffer(self) -> memoryview:
        return self._header

    def buffer_filled(self) -> memoryview:
        if self._frame is None:
            slot, generation, index, length, digest = _HEADER.unpack(self._header)
            if length != self._staging.nbytes:
                raise TransportError(f"a data connection sent a block of {length} bytes")
            self._frame = (slot, generation, index, digest)
            return self._staging
        frame, self._frame = self._frame, None
        self._take(*frame)
        self._connection.acknowledge(1)
        return self._header

    def ended(self) -> None:
        """Do nothing: bytes that were not copied yet never will be."""

    def _take(self, slot: int, generation: int, index: int, digest: bytes) -> None:
        writer, hooks = self._writer, self._hooks
        ref = hooks.resolve(writer, slot, generation)
        blocks = None if ref is None else hooks.destinations(writer, ref, range(index, index + 1))
        if ref is None or blocks is None:
            return
        if block_digest(ref, index, self._staging) != digest:
            hooks.corrupt(writer, ref)
            return
        write_block(self._memory, blocks[0], self._staging)
        hooks.arrived(writer, ref, index, [digest])


class TcpChannel:
    """End of the prefill worker: one data socket to one decode worker."""

    def __init__(self, connection: DataConnection) -> None:
        self._connection = connection
        self._sent = 0

    @classmethod
    async def open(cls, welcome: Welcome) -> TcpChannel:
        """Connect and register. Raises TransportError."""
        return cls(await DataConnection.open(welcome, len(_ACCEPTED)))

    @property
    def sent(self) -> int:
        """Number of blocks that were given to the socket."""
        return self._sent

    @property
    def acknowledged(self) -> int:
        """Number of blocks that the other end has taken or dropped."""
        return self._connection.acknowledged

    @property
    def broken(self) -> bool:
        """True if the other end closed the socket."""
        return self._connection.broken

    async def send(self, run: Run, still_granted: StillGranted) -> list[bytes] | None:
        """Send a run block by block; returns when the kernel has its bytes. Raises TransportError."""
        digests = []
        for index, block in enumerate(run.block_ids, run.first):
            if not still_granted(run.ref):
                return None
            payload = await fetch_block(run.memory, block, run.computed)
            digests.append(block_digest(run.ref, index, payload))
            await self.send_block(*damage_place(run.ref, index), damage_payload(payload), digests[-1])
        return digests

    async def send_block(self, ref: GrantRef, index: int, payload: memoryview, digest: bytes) -> None:
        """Send one block. Raises TransportError."""
        self._sent += 1
        header = _HEADER.pack(ref.slot, ref.generation, index, payload.nbytes, digest)
        await self._connection.send(header)
        await self._connection.send(truncate_payload(payload))

    def close(self) -> None:
        """Send no more. Call it when no `send` runs."""
        self._connection.close()
