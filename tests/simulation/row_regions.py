"""Registration for regions of rows between simulated hosts, without sockets of the real kernel.

It stands in for `kvtransfer.transports.fd_passing` there; the regions and both their ends run as they are. In
one half of the runs encode workers are on the host of the prefill workers, in the others elsewhere: there
rows take the simulated data sockets.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import TypeVar

from kvtransfer.protocol.messages import WriterId
from kvtransfer.transports.base import Admission, TransportError, host_id
from kvtransfer.transports.memory_mapping import ExportedPool
from tests.simulation.virtual_loop import Host, current_host

T = TypeVar("T")


class RegionSockets:
    """The listening ends, by endpoint."""

    def __init__(self, network: int) -> None:
        """Decide by the seed `network` whether encode workers share a host with prefill workers."""
        self.one_host = network % 2 == 0
        self._listeners: dict[str, RegionSocket] = {}

    def host_id(self) -> str:
        """Stand in for `host_id` at encode workers."""
        return host_id() if self.one_host else "elsewhere"

    def listen(self, export: Callable[[WriterId], ExportedPool], dead: object) -> RegionSocket:
        """Stand in for `PoolFdSocket`."""
        endpoint = f"@rows-{len(self._listeners)}"
        self._listeners[endpoint] = RegionSocket(endpoint, export, current_host.get())
        return self._listeners[endpoint]

    async def register(self, admission: Admission, mapped: Callable[[ExportedPool], T]) -> T:
        """Stand in for `fd_passing.register`."""
        await asyncio.sleep(0.001)
        listener = self._listeners[admission.endpoint]
        reader = listener.tokens.pop(admission.token, None)
        if reader is None or listener.host is None or listener.host.dead:
            raise TransportError("no region waits there")
        listener.readers.add(reader)
        return mapped(listener.export(reader))


class RegionSocket:
    """The encode worker's end; see `PoolFdSocket`."""

    def __init__(self, endpoint: str, export: Callable[[WriterId], ExportedPool], host: Host | None) -> None:
        self.endpoint, self.export, self.host = endpoint, export, host
        self.tokens: dict[bytes, WriterId] = {}
        self.readers: set[WriterId] = set()

    async def start(self) -> None: ...

    def admit(self, reader: WriterId, pid: int) -> bytes:
        token = secrets.token_bytes(32)
        self.tokens[token] = reader
        return token

    def registered(self, reader: WriterId) -> bool:
        return reader in self.readers

    async def close(self) -> None:
        self.tokens.clear()
