"""Interface of a transport: its two ends, and the events of its receiving end.

A transport registers writers, brings (or maps) bytes, and fences. What may be written, and when a block may
be used again, is decided by the state machines alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.parallel.kv_routes import Holders
from diptych.engine.parallel.kv_shares import KVShare
from diptych.runtime.internal_tls import InternalTls
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.protocol.pull_table import Pull


class TransportError(Exception):
    """Transport that could not be opened, or broke."""


@dataclass(frozen=True, slots=True)
class Locality:
    """Location of a process, as far as sharing memory goes."""

    host_id: str
    """Processes of equal ids share a kernel and its namespaces."""
    device: str = ""
    """UUID of the GPU with its KV blocks, empty for host memory."""
    pid: int = 0
    """Process id on that host."""


@dataclass(frozen=True, slots=True)
class ReceiverHooks:
    """Callbacks of a receiving end, called on the event loop."""

    dead: Callable[[WriterId], None]
    """Reports the proof that this writer can write no more by this transport."""
    resolve: Callable[[WriterId, int, int], GrantRef | None]
    """Returns the grant of this writer at (slot, generation), None unless it is open."""
    destinations: Callable[[WriterId, GrantRef, range], Sequence[int] | None]
    """Returns the blocks of the pool for these indices of a grant; None: the data is stale."""
    arrived: Callable[[WriterId, GrantRef, int, Sequence[bytes]], None]
    """Reports blocks at their destinations, from this index of the grant on, with the digest of each."""
    corrupt: Callable[[WriterId, GrantRef], None]
    """Reports a block that does not match its digest."""
    exchanged: Callable[[WriterId, KVMemory], KVMemory] = lambda writer, memory: memory
    """Returns what of the blocks of the pool this writer's frames bring: all of it, or one segment."""


class ReceivingTransport(Protocol):
    """End of the decode worker, one for all its writers."""

    name: str
    in_place: bool
    """True if the writer computes straight into the granted blocks."""

    def unreachable_reason(self, writer: Locality) -> str | None:
        """Return why a writer at this locality cannot use the transport, None if it can."""
        ...

    async def start(self) -> None:
        """Listen. Raises OSError."""
        ...

    @property
    def endpoint(self) -> str:
        """Address where writers register, for the welcome."""
        ...

    def admit(self, writer: WriterId, pid: int) -> bytes:
        """Let a writer register; return the token that it must show."""
        ...

    def registered(self, writer: WriterId) -> bool:
        """Return True if this writer registered and is not known to be dead."""
        ...

    def fence(self, writer: WriterId) -> None:
        """Make sure that the writer can write no more; `dead` follows when that is proven."""
        ...

    def pushed(self, writer: WriterId, ref: GrantRef, first: int, count: int) -> None:
        """Take the writer's announcement of blocks: for transports that do not see them arrive."""
        ...

    def link_lost(self, writer: WriterId) -> None:
        """Take the end of the writer's stream; a transport whose data path this process owns closes it."""
        ...

    async def close(self) -> None:
        """Stop listening and forget the writers."""
        ...


@runtime_checkable
class RankedReceiver(ReceivingTransport, Protocol):
    """A receiving end whose writers may be several processes, each of which writes.

    Such a writer has registered when all of them have, and `dead` is reported when none of them is left.
    """

    def admit_ranks(self, writer: WriterId, pids: Sequence[int]) -> list[bytes]:
        """Let these processes register as one writer; return the token of each."""
        ...


@runtime_checkable
class HolderReach(Protocol):
    """A receiving end for which it matters who holds which shares of a writer's blocks."""

    def unreachable_holders(
        self, holders: Holders, pids: Sequence[int], devices: Sequence[str] = ()
    ) -> str | None:
        """Return why blocks of a writer cannot come whose processes `pids` hold these shares; None: they can.

        `devices` are the UUIDs of their GPUs, empty for host memory. Without holders the writer sends whole
        blocks.
        """
        ...


@runtime_checkable
class HolderReceiver(ReceivingTransport, Protocol):
    """A receiving end to which each process with a share of the blocks may send its own."""

    def admit_holders(
        self, writer: WriterId, holders: Holders, pids: Sequence[int] = ()
    ) -> Sequence[KVHolder]:
        """Let the processes that hold these shares of a writer's blocks register as that writer.

        Args:
            pids: those of them on the writer's host, the writer's own first.

        Returns where each of them sends which shares; nothing where blocks are to be sent whole.
        """
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of one grant, from index `first` of its table on."""

    ref: GrantRef
    first: int
    memory: KVMemory
    block_ids: Sequence[int]
    """The blocks in `memory`."""
    target_ids: Sequence[int] = ()
    """Blocks of the decode worker's pool that they go to, for transports that map it."""
    computed: torch.cuda.Event | None = None
    """Event after which the blocks are computed; None on the CPU."""


StillGranted = Callable[[GrantRef], bool]


class PullChannel(Protocol):
    """End of the prefill worker for pulls from one decode worker. When it breaks, it cuts them."""

    @property
    def broken(self) -> bool:
        """True once nothing more comes by it."""
        ...

    def request(self, pull: Pull) -> None:
        """Ask for the blocks of a pull, which is open; what comes changes it."""
        ...

    async def withdraw(self, pull: Pull) -> None:
        """Ask for no more blocks of a pull; ends, cancelled or not, once none is copied but by its table."""
        ...

    def close(self) -> None:
        """Read nothing more; nothing is copied from this moment on."""
        ...


class PushChannel(Protocol):
    """End of the prefill worker in a copying transport."""

    @property
    def sent(self) -> int:
        """Number of blocks that left this end since it was opened."""
        ...

    @property
    def acknowledged(self) -> int:
        """Number of them that the other end has taken, or dropped as stale."""
        ...

    @property
    def broken(self) -> bool:
        """True if the other end is gone: nothing more will be acknowledged."""
        ...

    async def send(self, run: Run, still_granted: StillGranted) -> list[bytes] | None:
        """Send the blocks of a run and return the digest of each; None once the grant was revoked.

        When the call ends, cancelled or not, the blocks of the run are not read any more. Raises
        TransportError.
        """
        ...

    def close(self) -> None:
        """Send no more."""
        ...


class Admission(Protocol):
    """Credentials with which a worker registers at another one's endpoint, once its hello was accepted."""

    @property
    def address(self) -> str:
        """Address of the other worker's gRPC server."""
        ...

    @property
    def endpoint(self) -> str:
        """Abstract name of a Unix socket behind an @, or host:port."""
        ...

    @property
    def token(self) -> bytes:
        """Proof of the hello, which the endpoint demands first."""
        ...

    @property
    def tls(self) -> InternalTls | None:
        """Certificates for its sockets; None: they are plain."""
        ...

    @property
    def role(self) -> str:
        """Role of the other worker, which its certificate names."""
        ...


@dataclass(frozen=True, slots=True)
class KVHolder:
    """Process of a worker with a memory of its own, or several that share one."""

    shares: tuple[KVShare, ...]
    """Shares of each block that are there."""
    endpoint: str
    """Address for its shares, as host:port, or behind an @ where its memory is mapped."""
    tokens: tuple[bytes, ...]
    """Proof of admission for each holder of the other worker, in their order."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer of the decode worker about the transport that was chosen."""

    address: str
    """Address of the decode worker's gRPC server."""
    endpoint: str
    token: bytes
    layout: KVLayout
    num_blocks: int
    pull_endpoint: str = ""
    """Address where the cached prefix of grants can be read; empty where it cannot."""
    pull_token: bytes = b""
    tls: InternalTls | None = None
    """Certificates for its sockets; None: they are plain."""
    role: str = "decode"
    holders: tuple[KVHolder, ...] = ()
    """Processes that hold shares of blocks, the decode worker's own first; empty: blocks go whole."""


class WriterRanks(Protocol):
    """The processes of a prefill worker beside the one that holds its links: they compute, and so write."""

    @property
    def pids(self) -> Sequence[int]:
        """Process ids, in the order of the ranks."""
        ...

    @property
    def holders(self) -> Holders | None:
        """Shares of each process with a memory of its own, this one's first; None: all have one memory."""
        ...

    @property
    def devices(self) -> Sequence[str]:
        """UUID of the GPU of each of these holders, empty for host memory."""
        ...

    async def map_pool(self, memory: KVMemory, welcome: Welcome, tokens: Sequence[bytes]) -> None:
        """Have each of them register with its token, and map the pool that is `memory` here.

        Where the welcome has holders, each registers with that of its number, and maps its share of blocks.

        They unmap it when `memory` is dropped. Raises TransportError.
        """
        ...


def host_id() -> str:
    """Return an id that two processes share exactly if pids and abstract sockets mean the same to both.

    It covers the kernel and the pid and network namespaces. Containers of one machine differ unless they
    share those; they then use tcp.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid")]
    return hashlib.sha256("|".join([boot, *spaces]).encode()).hexdigest()[:32]


CPU = torch.device("cpu")


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of the GPU, which names it on every machine; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
