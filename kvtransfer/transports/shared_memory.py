"""Shared-memory transport: the prefill worker maps the decode pool and computes straight into granted blocks.

With the pool in a memfd this is `shared_memory`, between CPU workers of one host. With the pool on a GPU it
is `cuda_shared`, between workers on that same GPU: the pool is passed as an IPC handle, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.parallel.kv_routes import Holders
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports.base import Locality, ReceiverHooks, Welcome
from kvtransfer.transports.fd_passing import PoolFdSocket, register
from kvtransfer.transports.memory_mapping import MemoryMapping
from kvtransfer.transports.pool_memory import PoolMemory

NAME = "shared_memory"
ON_GPU = "cuda_shared"


class SharedMemoryReceiver:
    """End of the decode worker: maps its pool into admitted writers and keeps a pidfd of each."""

    in_place = True

    def __init__(self, name: str, pool: PoolMemory, mapping: MemoryMapping, hooks: ReceiverHooks) -> None:
        self.name = name
        self._mapping = mapping
        self._socket = PoolFdSocket(lambda writer: mapping.export(pool), hooks.dead)

    def unreachable_reason(self, writer: Locality) -> str | None:
        """Return why a writer there cannot map this pool and compute in it, None if it can."""
        return self._mapping.unreachable_reason(writer, in_place=True)

    def unreachable_holders(
        self, holders: Holders, pids: Sequence[int], devices: Sequence[str] = ()
    ) -> str | None:
        """See `HolderReach.unreachable_holders`: all processes of a writer map the one pool."""
        return "ranks with memories of their own" if len(holders) > 1 else None

    async def start(self) -> None:
        """Listen. Raises OSError."""
        await self._socket.start()

    @property
    def endpoint(self) -> str:
        """Abstract name of the socket behind an @."""
        return self._socket.endpoint

    def admit(self, writer: WriterId, pid: int) -> bytes:
        """Let the process `pid` register as `writer`; return the token."""
        return self._socket.admit(writer, pid)

    def admit_ranks(self, writer: WriterId, pids: Sequence[int]) -> list[bytes]:
        """Let these processes register as one writer; return the token of each."""
        return self._socket.admit_ranks(writer, pids)

    def registered(self, writer: WriterId) -> bool:
        """Return True if this writer maps the pool, as far as this process knows."""
        return self._socket.registered(writer)

    def fence(self, writer: WriterId) -> None:
        """Kill the writer's processes; `dead` follows."""
        self._socket.fence(writer)

    def pushed(self, writer: WriterId, ref: GrantRef, first: int, count: int) -> None:
        """Do nothing: the blocks were computed in place."""

    def link_lost(self, writer: WriterId) -> None:
        """Do nothing: a broken stream proves nothing, the process may still write."""

    async def close(self) -> None:
        """Stop listening and forget the writers."""
        await self._socket.close()


async def open_shared_memory(welcome: Welcome, mapping: MemoryMapping) -> KVMemory:
    """Register with a decode worker and map its pool. Raises TransportError."""
    return await register(welcome, lambda pool: mapping.map(pool, welcome.layout, welcome.num_blocks))
