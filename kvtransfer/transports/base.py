"""The two ends of a transport, and what its receiving end tells the hand-over.

A transport registers writers, brings (or maps) bytes, and fences. What may be written, and when a block may
be used again, is decided by the state machines alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.kv_memory import KVLayout
from kvtransfer.messages import GrantRef, WriterId


class TransportError(Exception):
    """A transport could not be opened, or broke."""


@dataclass(frozen=True, slots=True)
class ReceiverHooks:
    """What a receiving end calls, on the event loop."""

    dead: Callable[[WriterId], None]
    """Proven: this writer can write no more by this transport."""
    named: Callable[[WriterId, int, int], GrantRef | None]
    """The grant of this writer at (slot, generation), None if that is not open."""
    destination: Callable[[WriterId, GrantRef, int], memoryview | None]
    """Where the bytes of block `index` of a grant belong now; None: they are stale."""
    arrived: Callable[[WriterId, GrantRef, int, bytes], None]
    """Block `index` is at its destination; its digest."""
    corrupt: Callable[[WriterId, GrantRef], None]
    """A block came that does not match its digest."""


class ReceivingTransport(Protocol):
    """The decode worker's end, one for all its writers."""

    name: str
    in_place: bool

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

    def link_lost(self, writer: WriterId) -> None:
        """The writer's stream broke. A transport whose data path we own ends it here."""
        ...

    async def close(self) -> None:
        """Stop listening and forget the writers."""
        ...


class PushChannel(Protocol):
    """The prefill worker's end of a copying transport."""

    async def send(self, ref: GrantRef, index: int, payload: memoryview, digest: bytes) -> None:
        """Send one block; returns when its bytes are the kernel's. Raises TransportError."""
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
