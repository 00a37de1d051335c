"""The shared-memory transport between simulated hosts: one memory, and a kernel that reports deaths.

It stands in for `kvtransfer.transports.shared_memory`, which uses the real kernel.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context

from diptych.engine.kv.kv_memory import KVMemory
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports.base import Locality, ReceiverHooks, TransportError, Welcome
from kvtransfer.transports.pool_memory import PoolMemory
from kvtransfer.transports.registered_writers import RegisteredWriters
from kvtransfer.transports.shared_memory import NAME
from tests.simulation.ranks import KERNEL_S, pid_of
from tests.simulation.virtual_loop import Host, VirtualLoop, current_host


class InPlaceReceiver:
    """The decode worker's end of the transport."""

    name = NAME
    in_place = True

    def __init__(self, shared_pools: SharedPools, pool: PoolMemory, hooks: ReceiverHooks) -> None:
        self._shared_pools = shared_pools
        self.memory = pool.memory
        self._context = copy_context()
        self._writers = RegisteredWriters(hooks.dead)
        self.endpoint = shared_pools.enter(self)

    def unreachable_reason(self, writer: Locality) -> str | None:
        """Return None: all hosts that offer this transport are processes of one machine."""
        return None

    async def start(self) -> None: ...
    def pushed(self, writer: WriterId, ref: GrantRef, first: int, count: int) -> None: ...

    def admit(self, writer: WriterId, pid: int) -> bytes:
        return self._writers.admit(writer, [pid])[0]

    def admit_ranks(self, writer: WriterId, pids: Sequence[int]) -> list[bytes]:
        return self._writers.admit(writer, pids)

    def registered(self, writer: WriterId) -> bool:
        return self._writers.registered(writer)

    def fence(self, writer: WriterId) -> None:
        """Kill the processes; their death is reported by the kernel."""
        self._writers.fence(writer)

    def link_lost(self, writer: WriterId) -> None:
        """Do nothing: a lost link proves nothing."""

    async def close(self) -> None:
        self._writers.close()
        self._shared_pools.leave(self)

    def keep(self, token: bytes, host: Host) -> None:
        writer = self._writers.take(token, pid_of(host))
        self._writers.keep(writer, MappingHost(host, self._shared_pools, self._context))


class MappingHost:
    """A simulated process that maps a pool."""

    def __init__(self, host: Host, shared_pools: SharedPools, context: Context) -> None:
        self._host, self._shared_pools, self._context = host, shared_pools, context
        self._watched = True

    @property
    def pid(self) -> int:
        return pid_of(self._host)

    def kill(self) -> None:
        self._shared_pools.kill(self._host, "fenced")

    def watch(self, on_death: Callable[[], None]) -> None:
        """Call `on_death` in the decode worker once the kernel reports the end of the process."""
        loop = self._shared_pools.loop

        def reported() -> None:
            if self._watched:
                on_death()

        def report() -> None:
            loop.at(loop.now + KERNEL_S, reported, context=self._context)

        report() if self._host.dead else self._host.on_death.append(report)

    def close(self) -> None:
        self._watched = False


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

    def register(self, welcome: Welcome, token: bytes, host: Host) -> None:
        """Register another process of a writer, which maps the same pool. Raises TransportError."""
        receiver = self._receivers.get(welcome.endpoint)
        if receiver is None or host.dead:
            raise TransportError("no receiver listens there")
        receiver.keep(token, host)
