"""Process-group transports, NCCL and Gloo: blocks travel between two ranks, packed into ring slots.

Beside the process group runs a data socket (`data_listener`), which carries the header of the next message
one way and the count of taken blocks the other way. Its end is the end of the group, and the fence.

    greeting = port of the group's store u16, secret of the group
    frame    = slot u32, generation u64, first index u32, count u32, count digests

For each frame one message of `count` blocks follows in the group. It is received into a slot of the ring,
never into the pool: from there a block is copied only if its grant is open at this moment, and its digest
fits grant and index. A receive is posted only once its frame has come, so that an idle group holds neither a
thread nor, with NCCL, a kernel on the GPU. At most as many messages are in flight as there are slots.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import secrets
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diptych.engine.kv.kv_memory import KVMemory
from diptych.runtime.internal_tls import InternalTls
from diptych.runtime.task_cancellation import to_its_end
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports import process_group
from kvtransfer.transports.base import (
    Locality,
    ReceiverHooks,
    Run,
    StillGranted,
    TransportError,
    Welcome,
    host_id,
)
from kvtransfer.transports.blocking import BlockingThread
from kvtransfer.transports.data_connection import DataConnection, endpoint_address
from kvtransfer.transports.data_listener import DataSocket, SocketReceiver
from kvtransfer.transports.host_blocks import DIGEST_BYTES
from kvtransfer.transports.process_group import (
    DECODE_RANK,
    NCCL,
    PREFILL_RANK,
    ProcessGroup,
    nccl_unusable_reason,
)
from kvtransfer.transports.staging import SLOTS, DeviceStaging, HostStaging, Staging

_SECRET_BYTES = 32
GREETING = struct.Struct(f"<H{_SECRET_BYTES}s")
_HEADER = struct.Struct("<IQII")
_log = logging.getLogger(__name__)


def make_staging(name: str, memory: KVMemory) -> Staging:
    """Make the ring slots of one end: on the GPU for NCCL, in host memory for Gloo."""
    return DeviceStaging(memory) if name == NCCL else HostStaging(memory)


@dataclass(frozen=True, slots=True)
class _Frame:
    slot: int
    generation: int
    first: int
    digests: tuple[bytes, ...]


def process_group_receiver(
    name: str, host: str, memory: KVMemory, hooks: ReceiverHooks, tls: InternalTls | None = None
) -> SocketReceiver:
    """Make the end of the decode worker, with a process group for each writer.

    Gloo reaches every locality; NCCL needs GPUs on both sides. Neither encrypts: with certificates
    they stay within the host, unless `tls` allows them the network.
    """

    def open_reader(writer: WriterId, connection: DataSocket) -> _FrameReader:
        return _FrameReader(name, writer, connection, memory, hooks)

    def unreachable_reason(writer: Locality) -> str | None:
        if tls is not None and not tls.plain_groups and writer.host_id != host_id():
            return "it does not encrypt, and the writer is on another host: --insecure-kv-network allows that"
        return nccl_unusable_reason(memory.data.device, writer.device) if name == NCCL else None

    return SocketReceiver(name, host, open_reader, hooks, unreachable_reason, tls=tls)


class _FrameReader:
    """Reader of one writer's frames, which receives and unpacks the messages that they announce."""

    def __init__(
        self, name: str, writer: WriterId, connection: DataSocket, memory: KVMemory, hooks: ReceiverHooks
    ) -> None:
        self._name, self._writer, self._connection, self._hooks = name, writer, connection, hooks
        self._device = memory.data.device
        self._staging = make_staging(name, memory)
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._host = connection.local_host()
        try:
            self._listener, self._port = process_group.listen_for_store(self._host)
        except OSError as error:
            raise TransportError(f"no port for the process group's store: {error}") from error
        self._header = memoryview(bytearray(_HEADER.size))
        self._digests = memoryview(bytearray(0))
        self._reading_digests = False
        self._frames: asyncio.Queue[_Frame] = asyncio.Queue()
        self._received: asyncio.Queue[tuple[int, _Frame]] = asyncio.Queue()
        self._thread = BlockingThread(f"{name}-receive")
        self._group: ProcessGroup | None = None
        self._task = asyncio.create_task(self._serve())

    def greeting(self) -> bytes:
        return GREETING.pack(self._port, self._secret)

    def first_buffer(self) -> memoryview:
        return self._header

    def buffer_filled(self) -> memoryview:
        slot, generation, first, count = _HEADER.unpack(self._header)
        if not self._reading_digests:
            if not 1 <= count <= self._staging.blocks:
                raise TransportError(f"a frame of {count} blocks")
            self._digests = memoryview(bytearray(count * DIGEST_BYTES))
            self._reading_digests = True
            return self._digests
        self._reading_digests = False
        if self._frames.qsize() + self._received.qsize() >= SLOTS:
            raise TransportError("more messages in flight than there are slots")
        whole = bytes(self._digests)
        digests = tuple(whole[at : at + DIGEST_BYTES] for at in range(0, len(whole), DIGEST_BYTES))
        self._frames.put_nowait(_Frame(slot, generation, first, digests))
        return self._header

    def ended(self) -> None:
        self._task.cancel()
        self._listener.close()
        if self._group is not None:
            self._group.abort()
        self._thread.stop()

    async def _serve(self) -> None:
        try:
            self._group = await self._join()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive(self._group))
                tasks.create_task(self._copy_received())
        except* TransportError as errors:
            if not self._connection.closed:
                worker = self._writer.worker_id
                _log.warning("the process group with prefill worker %s: %s", worker, errors.exceptions[0])
        finally:
            self._connection.end()

    async def _join(self) -> ProcessGroup:
        """Return the group once it is built. Raises TransportError, which ends the other side's wait too."""
        try:
            async with asyncio.timeout(process_group.BUILD_S + process_group.TRANSFER_S):
                return await self._thread.run(self._build)
        except TimeoutError as error:
            raise TransportError(f"the {self._name} process group was not built in time") from error

    def _build(self) -> ProcessGroup:
        store = process_group.open_store(self._host, self._port, self._listener)
        group = process_group.build(self._name, store, DECODE_RANK, self._host, self._device)
        self._staging.prepare()
        shown = torch.empty(_SECRET_BYTES, dtype=torch.uint8, device=self._staging.data(0, 1).device)
        group.receive(shown)
        if not hmac.compare_digest(bytes(shown.tolist()), self._secret):
            raise TransportError("another process than the one of the data connection joined the group")
        return group

    async def _receive(self, group: ProcessGroup) -> None:
        """Receive one message after another, each into the next slot, which is free as the counts show."""
        for slot in itertools.cycle(range(SLOTS)):
            frame = await self._frames.get()
            await self._thread.run(group.receive, self._staging.data(slot, len(frame.digests)))
            self._received.put_nowait((slot, frame))

    async def _copy_received(self) -> None:
        """Copy received blocks to their destinations, while the next message comes."""
        while True:
            slot, frame = await self._received.get()
            ref = self._hooks.resolve(self._writer, frame.slot, frame.generation)
            if ref is not None:
                await self._unpack(slot, frame, ref)
            self._connection.acknowledge(len(frame.digests))

    async def _unpack(self, slot: int, frame: _Frame, ref: GrantRef) -> None:
        writer, hooks = self._writer, self._hooks

        def destinations(indices: range) -> Sequence[int] | None:
            return None if self._connection.closed else hooks.destinations(writer, ref, indices)

        intact = await self._staging.unpack(slot, ref, frame.first, frame.digests, destinations)
        if intact is None or self._connection.closed:
            return
        if intact:
            hooks.arrived(writer, ref, frame.first, frame.digests)
        else:
            hooks.corrupt(writer, ref)


class ProcessGroupChannel:
    """End of the prefill worker: a process group with one decode worker.

    A slot is packed while the one before is sent. At most as many messages are in flight as there are slots.
    """

    def __init__(self, name: str, connection: DataConnection, host: str, scratch: KVMemory) -> None:
        self._name, self._connection = name, connection
        self._staging = make_staging(name, scratch)
        self._device = scratch.data.device
        self._store_host = host
        self._packer = BlockingThread(f"{name}-pack")
        self._thread = BlockingThread(f"{name}-send")
        self._building = asyncio.create_task(self._thread.run(self._build))
        self._building.add_done_callback(self._on_built)
        self._slot = self._sent = 0
        self._in_flight: deque[int] = deque()
        self._sending: set[asyncio.Task[None]] = set()
        self._failed = self._closed = False

    @classmethod
    async def open(cls, name: str, welcome: Welcome, scratch: KVMemory) -> ProcessGroupChannel:
        """Connect and register; the group is built meanwhile. Raises TransportError."""
        if name == NCCL and (why := nccl_unusable_reason(scratch.data.device)) is not None:
            raise TransportError(f"nccl: {why}")
        connection = await DataConnection.open(welcome, GREETING.size)
        return cls(name, connection, endpoint_address(welcome)[0], scratch)

    @property
    def sent(self) -> int:
        """Number of blocks whose frames were sent."""
        return self._sent

    @property
    def acknowledged(self) -> int:
        """Number of blocks that the other end has taken or dropped."""
        return self._connection.acknowledged

    @property
    def broken(self) -> bool:
        """True if the other end closed the data socket, or the group could not be built."""
        return self._connection.broken or self._failed

    async def send(self, run: Run, still_granted: StillGranted) -> list[bytes] | None:
        """Send a run, a slot at a time; the last are in flight on return. Raises TransportError."""
        group = await asyncio.shield(self._building)
        digests: list[bytes] = []
        size = self._staging.blocks
        for at in range(0, len(run.block_ids), size):
            if not still_granted(run.ref):
                return None
            digests += await self._send_slot(group, run, at, min(size, len(run.block_ids) - at))
        return digests

    async def _send_slot(self, group: ProcessGroup, run: Run, at: int, count: int) -> list[bytes]:
        if len(self._in_flight) == SLOTS:  # the slot is free when what it held was taken at the other end
            await self._connection.until_acknowledged(self._in_flight.popleft())
        slot, self._slot = self._slot, (self._slot + 1) % SLOTS
        # Until then the blocks are read, also where this is cancelled.
        digests = await to_its_end(self._packer.run(self._staging.pack, slot, run, at, count))
        self._sent += count
        self._in_flight.append(self._sent)
        header = _HEADER.pack(run.ref.slot, run.ref.generation, run.first + at, count)
        await self._connection.send(header + b"".join(digests))
        sending = asyncio.create_task(self._thread.run(group.send, self._staging.data(slot, count)))
        self._sending.add(sending)
        sending.add_done_callback(self._on_sent)
        return digests

    def _on_sent(self, sending: asyncio.Task[None]) -> None:
        self._sending.discard(sending)
        if not sending.cancelled() and (error := sending.exception()) is not None and not self._closed:
            _log.warning("%s", error)
            self._failed = True

    def close(self) -> None:
        """Send no more."""
        if self._closed:
            return
        self._closed = True
        self._connection.close()
        if self._building.done():
            self._on_built(self._building)
        else:
            self._building.cancel()
        for sending in self._sending:
            sending.cancel()
        self._packer.stop()
        self._thread.stop()

    def _build(self) -> ProcessGroup:
        port, secret = GREETING.unpack(self._connection.greeting)
        store = process_group.open_store(self._store_host, port, None)
        host = self._connection.local_host()
        group = process_group.build(self._name, store, PREFILL_RANK, host, self._device)
        self._staging.prepare()
        device = self._staging.data(0, 1).device
        group.send(torch.frombuffer(bytearray(secret), dtype=torch.uint8).to(device))
        return group

    def _on_built(self, building: asyncio.Task[ProcessGroup]) -> None:
        if building.cancelled():
            return
        if (error := building.exception()) is not None:
            if not self._closed:
                _log.warning("%s", error)
            self._failed = True
        elif self._closed:
            building.result().abort()
