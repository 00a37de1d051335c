"""The two ends of a transport, and what its receiving end tells the handoff.

A transport registers writers, brings (or maps) bytes, and fences. What may be written, and when a block may
be used again, is decided by the state machines alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from kvtransfer.protocol.messages import GrantRef, WriterId


class TransportError(Exception):
    """A transport could not be opened, or broke."""


@dataclass(frozen=True, slots=True)
class Locality:
    """Where a process runs, as far as sharing memory goes."""

    host_id: str
    """Equal ids share a kernel and its namespaces."""
    device: str = ""
    """Of its KV blocks: empty for host memory, else what names the GPU on every machine."""


@dataclass(frozen=True, slots=True)
class ReceiverHooks:
    """What a receiving end calls, on the event loop."""

    dead: Callable[[WriterId], None]
    """Proven: this writer can write no more by this transport."""
    resolve: Callable[[WriterId, int, int], GrantRef | None]
    """The grant of this writer at (slot, generation), None if that is not open."""
    destinations: Callable[[WriterId, GrantRef, range], Sequence[int] | None]
    """The blocks of the pool to which these places of a grant belong now; None: the data is stale."""
    arrived: Callable[[WriterId, GrantRef, int, Sequence[bytes]], None]
    """Blocks are at their destinations, from this place of the grant on; the digest of each."""
    corrupt: Callable[[WriterId, GrantRef], None]
    """A block came that does not match its digest."""


class ReceivingTransport(Protocol):
    """The decode worker's end, one for all its writers."""

    name: str
    in_place: bool
    """Whether the writer computes straight into the granted blocks."""

    def unreachable_reason(self, writer: Locality) -> str | None:
        """Why a writer at this place cannot use it; None: it can."""
        ...

    async def start(self) -> None:
        """Listen. Raises OSError."""
        ...

    @property
    def endpoint(self) -> str:
        """Where writers register, for the welcome."""
        ...

    def admit(self, writer: WriterId, pid: int) -> bytes:
        """Let a writer register; returns the token that it must show."""
        ...

    def registered(self, writer: WriterId) -> bool:
        """Whether this writer registered and is not known to be dead."""
        ...

    def fence(self, writer: WriterId) -> None:
        """See to it that the writer can write no more; `dead` follows when that is proven."""
        ...

    def pushed(self, writer: WriterId, ref: GrantRef, first: int, count: int) -> None:
        """The writer announced these blocks of a grant: for transports that do not see them come."""
        ...

    def link_lost(self, writer: WriterId) -> None:
        """The writer's stream broke. A transport whose data path we own ends it here."""
        ...

    async def close(self) -> None:
        """Stop listening and forget the writers."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of one grant: places `first ..` of its table."""

    ref: GrantRef
    first: int
    memory: KVMemory
    block_ids: Sequence[int]
    """Where they are, in `memory`."""
    target_ids: Sequence[int] = ()
    """Where they belong, in the decode worker's pool: for transports that map it."""
    computed: torch.cuda.Event | None = None
    """On a GPU: when it has come, the blocks are computed."""


StillGranted = Callable[[GrantRef], bool]


class PushChannel(Protocol):
    """The prefill worker's end of a copying transport."""

    @property
    def sent(self) -> int:
        """Blocks that left this end since it was opened."""
        ...

    @property
    def acknowledged(self) -> int:
        """How many of them the other end has taken, or dropped as stale."""
        ...

    @property
    def broken(self) -> bool:
        """Whether the other end is gone: nothing more will be acknowledged."""
        ...

    async def send(self, run: Run, still_granted: StillGranted) -> list[bytes] | None:
        """Send the blocks of a run and return the digest of each; None once the grant is not wanted.

        When it ends, cancelled or not, the blocks of the run are not read any more. Raises TransportError.
        """
        ...

    def close(self) -> None:
        """Send no more."""
        ...


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the decode worker's answer says of the transport that was chosen."""

    address: str
    """Of the decode worker's gRPC server."""
    endpoint: str
    token: bytes
    layout: KVLayout
    num_blocks: int


def host_id() -> str:
    """Equal for two processes exactly if pids and abstract sockets of one mean the same to the other.

    Containers of one machine differ unless they share those namespaces; they then talk by tcp.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid")]
    return hashlib.sha256("|".join([boot, *spaces]).encode()).hexdigest()[:32]


CPU = torch.device("cpu")


def gpu_uuid(device: torch.device) -> str:
    """What names this GPU on every machine; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
