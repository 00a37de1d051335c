"""Ways of rows of embeddings between an encode and a prefill worker, beside their stream.

A way is chosen as transports of blocks are: the prefill worker lists them in order of preference, the encode
worker takes the first that reaches it. The encode worker only copies, and never writes what belongs to the
other one: its fence is the generation of each ask, which every part names and its checksum binds. Where no
way opens, parts go over the stream itself.

| way | bytes | ends |
|---|---|---|
| shared_memory | through slots of a region that the encode worker owns | row_region.py |
| tcp | frames on a data socket, encrypted where workers have certificates | row_frames.py |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.runtime.internal_tls import InternalTls
from kvtransfer.protocol.messages import WriterId
from kvtransfer.protocol.row_transfer import RowsPart

SHARED_MEMORY, TCP, STREAM = "shared_memory", "tcp", "stream"
_SHARES_MEMORY = frozenset({"in_process", "shared_memory", "cuda_shared", "cuda_ipc"})
"""Transports of blocks within a host: rows, which pass through host memory, take its shared memory."""


@dataclass(frozen=True, slots=True)
class RowsAdmission:
    """Credentials with which a prefill worker registers at an encode worker; an `Admission`."""

    address: str
    """Address of the encode worker's gRPC server."""
    endpoint: str
    """Abstract name of a Unix socket behind an @, or host:port."""
    token: bytes
    tls: InternalTls | None = None
    """Certificates for its sockets; None: they are plain."""
    role: str = "encode"


class RowSender(Protocol):
    """End of the encode worker, of one prefill worker's link."""

    async def send(self, part: RowsPart) -> RowsPart | None:
        """Send a part's bytes, which never change; return the part as the stream has to bring it, if at all.

        Raises TransportError.
        """
        ...

    def read(self, parts: int) -> None:
        """Take the reader's count of parts whose slots are free again. Raises TransportError."""
        ...

    def close(self) -> None:
        """Send no more."""
        ...


class RowReceiver(Protocol):
    """End of the prefill worker, of one encode worker's link."""

    def locate(self, part: RowsPart) -> RowsPart:
        """Return an announced part with its bytes, which the caller copies at once. Raises TransportError."""
        ...

    def close(self) -> None:
        """Read nothing more, from this moment on."""
        ...


class RowListener(Protocol):
    """End of the encode worker, for all its readers."""

    name: str

    async def start(self) -> None:
        """Listen. Raises OSError."""
        ...

    def reaches(self, host_id: str) -> bool:
        """Return whether a process on that host can use it."""
        ...

    def admit(self, reader: WriterId, pid: int) -> tuple[str, bytes]:
        """Let the process `pid` register as `reader`; return the endpoint and the token. Raises OSError."""
        ...

    def withdraw(self, reader: WriterId, token: bytes) -> None:
        """Take back what was offered with a token, if no sender was opened; the reader's link has ended."""
        ...

    def open_sender(self, reader: WriterId) -> RowSender:
        """Return the sender to a reader that has registered. Raises TransportError."""
        ...

    async def close(self) -> None:
        """Stop listening, and forget the readers."""
        ...


OnPart = Callable[[RowsPart], None]
OnBroken = Callable[[str], None]


class StreamSender:
    """Sender whose parts go over the stream."""

    async def send(self, part: RowsPart) -> RowsPart | None:
        """Return the part."""
        return part

    def read(self, parts: int) -> None:
        """Do nothing: there are no slots."""

    def close(self) -> None:
        """Do nothing: the stream ends by itself."""


def row_ways(transports: Sequence[str]) -> tuple[str, ...]:
    """Return the ways of rows of a worker with these transports of blocks, in order of preference.

    Sockets are always among them: they are how rows leave a host.
    """
    shared = (SHARED_MEMORY,) if not _SHARES_MEMORY.isdisjoint(transports) else ()
    return (*shared, TCP)
