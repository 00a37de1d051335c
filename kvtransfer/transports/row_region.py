"""Rows through shared memory: a region of slots that an encode worker writes and one prefill worker reads.

    encode  → bytes into the next free slot, then their place and checksum over the stream
    prefill → copies the slot, checks the copy, and says over the stream how many parts it has read

The region is a memfd of a fixed size that belongs to the encode worker: the kernel frees it with the last of
the two. The prefill worker gets a file that it can only read, once token, user and pid are checked
(fd_passing.py). Either may die at any moment: what is not read whole was never there.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import weakref

from kvtransfer.protocol.messages import WriterId
from kvtransfer.protocol.row_slots import RowSlots
from kvtransfer.protocol.row_transfer import RowsPart
from kvtransfer.transports.base import TransportError
from kvtransfer.transports.fd_passing import PoolFdSocket, register
from kvtransfer.transports.memory_mapping import ExportedPool
from kvtransfer.transports.row_channels import SHARED_MEMORY, RowsAdmission

SLOT_BYTES = 1 << 20
SLOTS = 8
_HANDLE = b"rows"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class RowRegion:
    """Slots in a file of memory, at the encode worker; freed with the last reference to it."""

    def __init__(self) -> None:
        """Make an empty region; its pages take memory when they are written. Raises OSError."""
        fd = os.memfd_create("diptych-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, SLOTS * SLOT_BYTES)
            # Its size is sealed: no mapping of it can fault because the other process cut it short.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self._bytes = mmap.mmap(fd, SLOTS * SLOT_BYTES, mmap.MAP_SHARED)
            self._readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
        weakref.finalize(self, os.close, self._readable)

    def export(self) -> ExportedPool:
        """Return a file that another process can map, to read alone."""
        return ExportedPool(_HANDLE, [self._readable], owner=self)

    def write(self, slot: int, data: bytes | memoryview) -> None:
        """Write a slot from its begin on."""
        at = slot * SLOT_BYTES
        self._bytes[at : at + len(data)] = data


class RegionSender:
    """End of the encode worker: writes parts into slots, as they are free."""

    def __init__(self, region: RowRegion) -> None:
        self._region = region
        self._slots = RowSlots(SLOTS)
        self._changed = asyncio.Event()
        self._closed = False

    async def send(self, part: RowsPart) -> RowsPart | None:
        """Write a part once a slot is free; return what announces it. One that fits no slot is returned."""
        if len(part.data) > SLOT_BYTES:
            return part
        while not self._slots.free and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        if self._closed:
            raise TransportError("the region is closed")
        slot = self._slots.take()
        self._region.write(slot, part.data)
        return part._replace(data=b"", slot=slot)

    def read(self, parts: int) -> None:
        """Free the slots of all but the last parts. Raises TransportError for a count that cannot be."""
        try:
            self._slots.read(parts)
        except ValueError as error:
            raise TransportError(f"a prefill worker counts wrong: {error}") from error
        self._changed.set()

    def close(self) -> None:
        """Send no more."""
        self._closed = True
        self._changed.set()


class RegionListener:
    """Regions of one encode worker, one for each prefill worker on its host."""

    name = SHARED_MEMORY

    def __init__(self, host_id: str) -> None:
        self._host_id = host_id
        self._socket = PoolFdSocket(self._export, lambda reader: None)
        self._admitted: dict[WriterId, tuple[bytes, RowRegion]] = {}
        """Token and region of each reader that has not opened it yet."""

    async def start(self) -> None:
        """Listen. Raises OSError."""
        await self._socket.start()

    def reaches(self, host_id: str) -> bool:
        """Return whether a process with that host id is on this host."""
        return host_id == self._host_id

    def admit(self, reader: WriterId, pid: int) -> tuple[str, bytes]:
        """Make a region for a reader, and let it register. Raises OSError."""
        region = RowRegion()
        token = self._socket.admit(reader, pid)
        self._admitted[reader] = token, region
        return self._socket.endpoint, token

    def withdraw(self, reader: WriterId, token: bytes) -> None:
        """Keep the region no longer for a reader that did not open it, unless it was offered another."""
        if reader in self._admitted and self._admitted[reader][0] == token:
            del self._admitted[reader]

    def open_sender(self, reader: WriterId) -> RegionSender:
        """Return the sender to a reader, to which its region belongs from now on. Raises TransportError."""
        offered = self._admitted.pop(reader, None)
        if offered is None or not self._socket.registered(reader):
            raise TransportError("a prefill worker did not map the region that it was offered")
        return RegionSender(offered[1])

    async def close(self) -> None:
        """Stop listening, and forget the readers."""
        await self._socket.close()
        self._admitted.clear()

    def _export(self, reader: WriterId) -> ExportedPool:
        offered = self._admitted.get(reader)
        if offered is None:
            raise TransportError("no region waits for this prefill worker")
        return offered[1].export()


class RegionReceiver:
    """End of the prefill worker: the mapped region, which it reads."""

    def __init__(self, mapped: mmap.mmap, item_bytes: int) -> None:
        self._mapped, self._item_bytes = mapped, item_bytes
        self._bytes = memoryview(mapped)

    def locate(self, part: RowsPart) -> RowsPart:
        """Return a part with its bytes as they are in its slot. Raises TransportError for no such place."""
        if part.slot is None or part.slot >= SLOTS:
            raise TransportError("rows are announced in a slot that is not there")
        at = part.slot * SLOT_BYTES
        size = min(part.rows * part.width * self._item_bytes, SLOT_BYTES)
        return part._replace(data=self._bytes[at : at + size])

    def close(self) -> None:
        """Unmap the region."""
        self._bytes.release()
        self._mapped.close()


async def open_region(admission: RowsAdmission, item_bytes: int) -> RegionReceiver:
    """Register with an encode worker and map its region, for numbers of so many bytes.

    Raises TransportError.
    """
    return RegionReceiver(await register(admission, _map), item_bytes)


def _map(exported: ExportedPool) -> mmap.mmap:
    size = SLOTS * SLOT_BYTES
    if exported.handle != _HANDLE or len(exported.fds) != 1:
        raise ValueError("the encode worker sent no region")
    fd = exported.fds[0]
    if os.fstat(fd).st_size < size or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("the region is too small, or could become so")
    return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
