"""The prefill worker's end of a world of two; `paired` tells what goes over it.

A slot is packed while the one before is sent. At most as many messages are under way as there are slots.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

import torch

from diptych.engine.kv.kv_memory import KVMemory
from kvtransfer.transports import process_group as worlds
from kvtransfer.transports.base import Run, TransportError, Wanted, Welcome
from kvtransfer.transports.blocking_thread import BlockingThread
from kvtransfer.transports.data_connection import DataConnection, endpoint_of
from kvtransfer.transports.nccl import GREETING, HEADER, make_staging
from kvtransfer.transports.staging import SLOTS

_log = logging.getLogger(__name__)


class NcclChannel:
    """The prefill worker's end: one world with one decode worker."""

    def __init__(self, name: str, connection: DataConnection, host: str, scratch: KVMemory) -> None:
        self._name, self._connection = name, connection
        self._staging = make_staging(name, scratch)
        self._device = scratch.data.device
        self._store_host = host
        self._packer = BlockingThread(f"{name}-pack")
        self._thread = BlockingThread(f"{name}-send")
        self._building = asyncio.create_task(self._thread.run(self._build))
        self._building.add_done_callback(self._built)
        self._slot = self._sent = 0
        self._under_way: deque[int] = deque()
        self._sending: set[asyncio.Task[None]] = set()
        self._failed = self._closed = False

    @classmethod
    async def open(cls, name: str, welcome: Welcome, scratch: KVMemory) -> NcclChannel:
        """Connect and register; the world is built meanwhile. Raises TransportError."""
        if name == worlds.NCCL and (why := worlds.nccl_unusable(scratch.data.device)) is not None:
            raise TransportError(f"nccl: {why}")
        connection = await DataConnection.open(welcome, GREETING.size)
        return cls(name, connection, endpoint_of(welcome)[0], scratch)

    @property
    def sent(self) -> int:
        """Blocks whose frames were sent."""
        return self._sent

    @property
    def acknowledged(self) -> int:
        """Blocks that the other end has taken or dropped."""
        return self._connection.acknowledged

    @property
    def broken(self) -> bool:
        """Whether the other end closed the data socket, or the world could not be built."""
        return self._connection.broken or self._failed

    async def send(self, run: Run, wanted: Wanted) -> list[bytes] | None:
        """Send a run, a slot at a time; the last ones are still on their way then. Raises TransportError."""
        world = await asyncio.shield(self._building)
        digests: list[bytes] = []
        size = self._staging.blocks
        for at in range(0, len(run.block_ids), size):
            if not wanted(run.ref):
                return None
            digests += await self._send_slot(world, run, at, min(size, len(run.block_ids) - at))
        return digests

    async def _send_slot(self, world: worlds.ProcessGroup, run: Run, at: int, count: int) -> list[bytes]:
        if len(self._under_way) == SLOTS:  # the slot is free when what it held was taken at the other end
            await self._connection.until_acknowledged(self._under_way.popleft())
        slot, self._slot = self._slot, (self._slot + 1) % SLOTS
        packing = asyncio.create_task(self._packer.run(self._staging.pack, slot, run, at, count))
        try:
            digests = await asyncio.shield(packing)
        except asyncio.CancelledError:
            await packing  # until then the blocks are read
            raise
        self._sent += count
        self._under_way.append(self._sent)
        header = HEADER.pack(run.ref.slot, run.ref.generation, run.first + at, count)
        await self._connection.send(header + b"".join(digests))
        sending = asyncio.create_task(self._thread.run(world.send, self._staging.data(slot, count)))
        self._sending.add(sending)
        sending.add_done_callback(self._left)
        return digests

    def _left(self, sending: asyncio.Task[None]) -> None:
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
            self._built(self._building)
        else:
            self._building.cancel()
        for sending in self._sending:
            sending.cancel()
        self._packer.stop()
        self._thread.stop()

    def _build(self) -> worlds.ProcessGroup:
        port, secret = GREETING.unpack(self._connection.greeting)
        store = worlds.open_store(self._store_host, port, None)
        host = self._connection.local_host()
        world = worlds.build(self._name, store, worlds.PREFILL_RANK, host, self._device)
        self._staging.prepare()
        device = self._staging.data(0, 1).device
        world.send(torch.frombuffer(bytearray(secret), dtype=torch.uint8).to(device))
        return world

    def _built(self, building: asyncio.Task[worlds.ProcessGroup]) -> None:
        if building.cancelled():
            return
        if (error := building.exception()) is not None:
            if not self._closed:
                _log.warning("%s", error)
            self._failed = True
        elif self._closed:
            building.result().abort()
