"""The shared-memory transport between simulated hosts: one memory, and a kernel that reports deaths.

It stands in for `kvtransfer.transports.shared_memory`, which uses the real kernel.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextvars import copy_context

from diptych.engine.kv.kv_memory import KVMemory
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports.base import Locality, ReceiverHooks, TransportError, Welcome
from kvtransfer.transports.pool_memory import PoolMemory
from kvtransfer.transports.shared_memory import NAME
from tests.simulation.virtual_loop import Host, VirtualLoop, current_host

KERNEL_S = 0.003
"""Seconds from a process' end to the kernel's report of it."""


class InPlaceReceiver:
    """The decode worker's end of the transport."""

    name = NAME
    in_place = True

    def __init__(self, shared_pools: SharedPools, pool: PoolMemory, hooks: ReceiverHooks) -> None:
        self._shared_pools = shared_pools
        self.memory = pool.memory
        self._hooks = hooks
        self._context = copy_context()
        self._admitted: dict[bytes, WriterId] = {}
        self._writers: dict[WriterId, Host] = {}
        self.endpoint = shared_pools.enter(self)

    def unreachable_reason(self, writer: Locality) -> str | None:
        """Return None: all hosts that offer this transport are processes of one machine."""
        return None

    async def start(self) -> None: ...
    def pushed(self, writer: WriterId, ref: GrantRef, first: int, count: int) -> None: ...

    def admit(self, writer: WriterId, pid: int) -> bytes:
        token = f"{self.endpoint}/{next(self._shared_pools.numbers)}".encode()
        for old in [t for t, admitted in self._admitted.items() if admitted == writer]:
            del self._admitted[old]
        self._admitted[token] = writer
        return token

    def registered(self, writer: WriterId) -> bool:
        return writer in self._writers

    def fence(self, writer: WriterId) -> None:
        """Kill the process; its death is reported by the kernel."""
        host = self._writers.get(writer)
        if host is not None:
            self._shared_pools.kill(host, "fenced")

    def link_lost(self, writer: WriterId) -> None:
        """Do nothing: a lost link proves nothing."""

    async def close(self) -> None:
        self._writers.clear()
        self._shared_pools.leave(self)

    def keep(self, token: bytes, host: Host) -> None:
        writer = self._admitted.pop(token, None)
        if writer is None:
            raise TransportError("an unknown token")
        if self._writers.get(writer) is host:
            return
        self._writers[writer] = host

        def reported() -> None:
            if self._writers.get(writer) is host:
                del self._writers[writer]
                self._hooks.dead(writer)

        loop = self._shared_pools.loop
        host.on_death.append(lambda: loop.at(loop.now + KERNEL_S, reported, context=self._context))


class SharedPools:
    """The pools that can be mapped, by endpoint."""

    def __init__(self, loop: VirtualLoop, kill: Callable[[Host, str], None]) -> None:
        self.loop = loop
        self.kill = kill
        self.numbers = itertools.count()
        self._receivers: dict[str, InPlaceReceiver] = {}

    def enter(self, receiver: InPlaceReceiver) -> str:
        endpoint = f"@{next(self.numbers)}"
        self._receivers[endpoint] = receiver
        return endpoint

    def leave(self, receiver: InPlaceReceiver) -> None:
        self._receivers.pop(receiver.endpoint, None)

    async def open(self, welcome: Welcome, device: object) -> KVMemory:
        """Stand in for `registry.map_pool`."""
        await asyncio.sleep(0.001)
        receiver, host = self._receivers.get(welcome.endpoint), current_host.get()
        if receiver is None or host is None:
            raise TransportError("no receiver listens there")
        receiver.keep(welcome.token, host)
        return receiver.memory
