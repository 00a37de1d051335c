"""NCCL, and the same driver over Gloo: blocks travel in a world of two, packed into ring slots.

Beside it runs a data socket (`data_listener`), which says what the next message is and how many blocks were
taken; its end is the end of the pair, and the fence.

    greeting = port of the pair's store u16, secret of the pair
    frame    = slot u32, generation u64, first index u32, count u32, count digests

For each frame one message of `count` blocks follows in the world. It is received into a slot of the ring,
never into the pool: from there a block is copied only if its grant is open at this moment, and belongs there
by its digest. A receive is posted only once its frame has come, so that a world at rest holds neither a
thread nor, with NCCL, a kernel on the GPU. At most as many messages are under way as there are slots.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diptych.engine.kv.kv_memory import KVMemory
from kvtransfer.protocol.digest import DIGEST_BYTES
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports import process_group as worlds
from kvtransfer.transports.base import Place, ReceiverHooks, TransportError
from kvtransfer.transports.blocking_thread import BlockingThread
from kvtransfer.transports.data_listener import DataSocket
from kvtransfer.transports.device_staging import DeviceStaging
from kvtransfer.transports.socket_receiver import SocketReceiver
from kvtransfer.transports.staging import SLOTS, HostStaging, Staging

_SECRET_BYTES = 32
GREETING = struct.Struct(f"<H{_SECRET_BYTES}s")
HEADER = struct.Struct("<IQII")
_log = logging.getLogger(__name__)


def make_staging(name: str, memory: KVMemory) -> Staging:
    """NCCL's slots are beside the blocks; Gloo's are the host's, wherever the blocks are."""
    return DeviceStaging(memory) if name == worlds.NCCL else HostStaging(memory)


@dataclass(frozen=True, slots=True)
class _Frame:
    slot: int
    generation: int
    first: int
    digests: tuple[bytes, ...]


def paired_receiver(name: str, host: str, memory: KVMemory, hooks: ReceiverHooks) -> SocketReceiver:
    """The decode worker's end: a world for each writer. Gloo reaches everywhere; NCCL has its conditions."""

    def open_frames(writer: WriterId, connection: DataSocket) -> _Frames:
        return _Frames(name, writer, connection, memory, hooks)

    def unreachable(writer: Place) -> str | None:
        return worlds.nccl_unusable(memory.data.device, writer.device) if name == worlds.NCCL else None

    return SocketReceiver(name, host, open_frames, hooks, unreachable)


class _Frames:
    """Reads the frames of one writer, and receives and unpacks the messages that they name."""

    def __init__(
        self, name: str, writer: WriterId, connection: DataSocket, memory: KVMemory, hooks: ReceiverHooks
    ) -> None:
        self._name, self._writer, self._connection, self._hooks = name, writer, connection, hooks
        self._device = memory.data.device
        self._staging = make_staging(name, memory)
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._host = connection.local_host()
        try:
            self._listener, self._port = worlds.host_store(self._host)
        except OSError as error:
            raise TransportError(f"no port for the pair's store: {error}") from error
        self._header = memoryview(bytearray(HEADER.size))
        self._digests = memoryview(bytearray(0))
        self._reading_digests = False
        self._frames: asyncio.Queue[_Frame] = asyncio.Queue()
        self._received: asyncio.Queue[tuple[int, _Frame]] = asyncio.Queue()
        self._thread = BlockingThread(f"{name}-receive")
        self._world: worlds.ProcessGroup | None = None
        self._task = asyncio.create_task(self._serve())

    def greeting(self) -> bytes:
        return GREETING.pack(self._port, self._secret)

    def target(self) -> memoryview:
        return self._header

    def filled(self) -> memoryview:
        slot, generation, first, count = HEADER.unpack(self._header)
        if not self._reading_digests:
            if not 1 <= count <= self._staging.blocks:
                raise TransportError(f"a frame of {count} blocks")
            self._digests = memoryview(bytearray(count * DIGEST_BYTES))
            self._reading_digests = True
            return self._digests
        self._reading_digests = False
        if self._frames.qsize() + self._received.qsize() >= SLOTS:
            raise TransportError("more messages under way than there are slots")
        whole = bytes(self._digests)
        digests = tuple(whole[at : at + DIGEST_BYTES] for at in range(0, len(whole), DIGEST_BYTES))
        self._frames.put_nowait(_Frame(slot, generation, first, digests))
        return self._header

    def ended(self) -> None:
        self._task.cancel()
        self._listener.close()
        if self._world is not None:
            self._world.abort()
        self._thread.stop()

    async def _serve(self) -> None:
        try:
            self._world = await self._join()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._receive(self._world))
                group.create_task(self._land())
        except* TransportError as errors:
            if not self._connection.over:
                worker = self._writer.worker_id
                _log.warning("the pair with prefill worker %s: %s", worker, errors.exceptions[0])
        finally:
            self._connection.end()

    async def _join(self) -> worlds.ProcessGroup:
        """The world, if it is built in time; else the end of this side ends the other one's wait."""
        try:
            async with asyncio.timeout(worlds.BUILD_S + worlds.TRANSFER_S):
                return await self._thread.run(self._build)
        except TimeoutError as error:
            raise TransportError(f"the {self._name} world of two was not built in time") from error

    def _build(self) -> worlds.ProcessGroup:
        store = worlds.open_store(self._host, self._port, self._listener)
        world = worlds.build(self._name, store, worlds.DECODE_RANK, self._host, self._device)
        self._staging.prepare()
        shown = torch.empty(_SECRET_BYTES, dtype=torch.uint8, device=self._staging.data(0, 1).device)
        world.receive(shown)
        if not hmac.compare_digest(bytes(shown.tolist()), self._secret):
            raise TransportError("another process than the one of the data connection joined the world")
        return world

    async def _receive(self, world: worlds.ProcessGroup) -> None:
        """One message after another, each into the next slot: that it is free is what the counts say."""
        for slot in itertools.cycle(range(SLOTS)):
            frame = await self._frames.get()
            await self._thread.run(world.receive, self._staging.data(slot, len(frame.digests)))
            self._received.put_nowait((slot, frame))

    async def _land(self) -> None:
        """Copy what was received to where it belongs, while the next message comes."""
        while True:
            slot, frame = await self._received.get()
            ref = self._hooks.named(self._writer, frame.slot, frame.generation)
            if ref is not None:
                await self._unpack(slot, frame, ref)
            self._connection.took(len(frame.digests))

    async def _unpack(self, slot: int, frame: _Frame, ref: GrantRef) -> None:
        writer, hooks = self._writer, self._hooks

        def destinations(places: range) -> Sequence[int] | None:
            return None if self._connection.over else hooks.destinations(writer, ref, places)

        intact = await self._staging.unpack(slot, ref, frame.first, frame.digests, destinations)
        if intact is None or self._connection.over:
            return
        if intact:
            hooks.arrived(writer, ref, frame.first, frame.digests)
        else:
            hooks.corrupt(writer, ref)
