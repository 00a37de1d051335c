"""Rows by frames: parts go to a prefill worker over a data socket that it has opened.

    prefill → token of the welcome, and nothing more
    encode  → frames    generation u64, first row u32, rows u32, all rows u32, width u32, length u32, checksum
                        of the part, checksum of these fields, bytes

A frame is read into a staging buffer; what is done with it is decided by its ask (row_transfer.py). A damaged
header ends the socket, since its length cannot be trusted: then the link ends, and its attempts are placed
anew. Where workers have certificates (--internal-tls) frames are encrypted.
"""

from __future__ import annotations

import asyncio
import struct

import xxhash

from diptych.runtime.internal_tls import InternalTls
from kvtransfer.protocol.messages import WriterId
from kvtransfer.protocol.row_transfer import RowsPart
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.data_connection import DataConnection
from kvtransfer.transports.data_listener import DataListener, DataSocket
from kvtransfer.transports.row_channels import TCP, OnBroken, OnPart, RowsAdmission

_FIELDS = struct.Struct("<QIIIII16s")
_CHECK = struct.Struct("<8s")
HEADER_BYTES = _FIELDS.size + _CHECK.size
_MOST_BYTES = 1 << 30
"""Most bytes of a part: more is a fault, even of a row that alone is longer than parts should be."""
_ACCEPTED = b"+"


def frame_header(part: RowsPart) -> bytes:
    """Return the header of a part's frame."""
    place = (part.generation, part.first_row, part.rows, part.total_rows, part.width)
    fields = _FIELDS.pack(*place, len(part.data), part.checksum)
    return fields + _CHECK.pack(xxhash.xxh3_64(fields).digest())


def read_header(header: bytes | memoryview) -> tuple[RowsPart, int]:
    """Return the part that a header announces, without its bytes, and their number.

    Raises TransportError for a damaged header.
    """
    fields = bytes(header[: _FIELDS.size])
    generation, first, rows, total, width, length, checksum = _FIELDS.unpack(fields)
    if _CHECK.unpack(header[_FIELDS.size :]) != (xxhash.xxh3_64(fields).digest(),) or length > _MOST_BYTES:
        raise TransportError("a frame of rows has a damaged header")
    return RowsPart(generation, first, rows, total, width, b"", checksum), length


class FrameSender:
    """End of the encode worker: the data socket of one prefill worker."""

    def __init__(self, connection: DataSocket) -> None:
        self._connection = connection

    async def send(self, part: RowsPart) -> None:
        """Send a part once the other end has read enough of those before. Raises TransportError."""
        await self._connection.send(frame_header(part), part.data)

    def read(self, parts: int) -> None:
        """Raise TransportError: there are no slots."""
        raise TransportError("a prefill worker counts parts, and has no slots")

    def close(self) -> None:
        """End the socket."""
        self._connection.end()


class FrameListener:
    """Data sockets of one encode worker, one for each prefill worker."""

    name = TCP

    def __init__(self, host: str, tls: InternalTls | None = None) -> None:
        self._sockets: dict[WriterId, DataSocket] = {}
        self._listener = DataListener(host, self._accept, self._ended, tls=tls)

    async def start(self) -> None:
        """Listen on a free port. Raises OSError."""
        await self._listener.start()

    def reaches(self, host_id: str) -> bool:
        """Return True: a socket reaches every host."""
        return True

    def admit(self, reader: WriterId, pid: int) -> tuple[str, bytes]:
        """Let the process that shows the returned token register; pids mean nothing across hosts."""
        return self._listener.endpoint, self._listener.admit(reader)

    def withdraw(self, reader: WriterId, token: bytes) -> None:
        """Do nothing: all that waits is a token, in whose place the reader's next one comes."""

    def open_sender(self, reader: WriterId) -> FrameSender:
        """Return the sender to a reader that has registered. Raises TransportError."""
        if (connection := self._sockets.get(reader)) is None:
            raise TransportError("a prefill worker has no data socket")
        return FrameSender(connection)

    async def close(self) -> None:
        """Stop listening and end every socket."""
        await self._listener.close()

    def _accept(self, reader: WriterId, connection: DataSocket) -> _NothingToRead:
        self._sockets[reader] = connection
        return _NothingToRead()

    def _ended(self, reader: WriterId) -> None:
        self._sockets.pop(reader, None)


class _NothingToRead:
    """Reader of a socket on which the other end only listens."""

    def greeting(self) -> bytes:
        return _ACCEPTED

    def first_buffer(self) -> memoryview:
        return memoryview(bytearray(1))

    def buffer_filled(self) -> memoryview:
        raise TransportError("a prefill worker wrote to the data socket of its rows")

    def ended(self) -> None:
        """Do nothing: what is on its way is of no use any more."""


class FrameReceiver:
    """End of the prefill worker: reads frames until one is broken or the socket ends."""

    def __init__(self, connection: DataConnection, on_part: OnPart, on_broken: OnBroken) -> None:
        self._connection = connection
        self._on_part, self._on_broken = on_part, on_broken
        self._reader = asyncio.create_task(self._read(), name="frames of rows")

    @classmethod
    async def open(cls, admission: RowsAdmission, on_part: OnPart, on_broken: OnBroken) -> FrameReceiver:
        """Connect and register; a part's bytes are there until `on_part` returns. Raises TransportError."""
        connection = await DataConnection.open(admission, len(_ACCEPTED), counts=False)
        return cls(connection, on_part, on_broken)

    def locate(self, part: RowsPart) -> RowsPart:
        """Raise TransportError: there is no region."""
        raise TransportError("rows are announced in a region, and none is mapped")

    def close(self) -> None:
        """Read nothing more, from this moment on."""
        self._reader.cancel()

    async def _read(self) -> None:
        header, staging = memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray())
        why = "the data socket of its rows was closed"
        try:
            while True:
                await self._connection.receive_into(header)
                part, length = read_header(header)
                if length > len(staging):
                    staging = memoryview(bytearray(length))
                await self._connection.receive_into(staging[:length])
                self._on_part(part._replace(data=staging[:length]))
        except TransportError as error:
            why = str(error)
        finally:
            self._connection.close()
            self._on_broken(why)
