"""Data between the ranks of two workers: shares of blocks, their digests, and what ranks elsewhere do.

    frame = slot u32, generation u64, index u32, length u32, digest, bytes

The digest of a share binds its bytes to request, grant, index, sender and receiver. It is made of the hash of
the bytes, so that a rank that knows no grants hashes them, and the process that does compares. A block's
digest is that of its shares' digests, by sender and receiver.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import xxhash

from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.parallel.kv_routes import Holders
from diptych.engine.parallel.kv_shares import KVShare
from kvtransfer.protocol.messages import GrantRef
from kvtransfer.transports.held_blocks import Pieces
from kvtransfer.transports.host_blocks import DIGEST_BYTES, block_digest
from kvtransfer.transports.share_mapping import MappedRanks

HEADER = struct.Struct(f"<IQII{DIGEST_BYTES}s")
ACCEPTED = b"+"
_SESSION = struct.Struct("<QI")
_PAIR = struct.Struct(f"<II{DIGEST_BYTES}s")
SESSION_TOKEN_BYTES = _SESSION.size + 32


def share_hash(payload: bytes | bytearray | memoryview) -> bytes:
    """Return the 16 bytes of a share's own hash."""
    return xxhash.xxh3_128(payload).digest()


def share_digest(ref: GrantRef, index: int, source: int, target: int, hashed: bytes) -> bytes:
    """Return 16 bytes that bind a share of that hash to its block of a grant and to both its ends."""
    return block_digest(ref, index, _PAIR.pack(source, target, hashed))


def joined_digest(digests: Sequence[bytes]) -> bytes:
    """Return the digest of a block from those of its shares, in the order of its routes."""
    return xxhash.xxh3_128(b"".join(digests)).digest()


def session_token(secret: bytes, session: int, source: int) -> bytes:
    """Return what proves that sender `source` of a session was admitted."""
    named = _SESSION.pack(session, source)
    return named + hmac.digest(secret, named, "sha256")


def read_session_token(secret: bytes, token: bytes) -> tuple[int, int] | None:
    """Return session and sender of a token, None if `secret` did not make it."""
    session, source = _SESSION.unpack(token[: _SESSION.size])
    return (session, source) if hmac.compare_digest(token, session_token(secret, session, source)) else None


def pieces_bytes(layout: KVLayout, pieces: Pieces) -> int:
    """Return the number of bytes of pieces of a block."""
    _, kinds, _, numbers = layout.block_shape
    return sum(len(p.layers) * kinds * len(p.heads) * numbers for p in pieces) * layout.dtype.itemsize


# -- ranks with memories of their own


@dataclass(frozen=True, slots=True)
class PushTarget:
    """Receiver of a rank's shares of blocks: pieces by their place in the sender's memory."""

    target: int
    endpoint: str
    token: bytes
    pieces: tuple[KVShare, ...]


@dataclass(frozen=True, slots=True)
class ArrivedShare:
    """Share of a block that a rank has received and keeps until it is placed or dropped."""

    session: int
    source: int
    slot: int
    generation: int
    index: int
    digest: bytes
    """Digest in its frame."""
    hashed: bytes
    """Hash of the bytes that came."""
    length: int
    staged: int
    """Number by which the rank keeps it."""


@dataclass(frozen=True, slots=True)
class SessionBroke:
    """End of a data connection at a rank."""

    session: int


RankEvent = ArrivedShare | SessionBroke


@runtime_checkable
class RankBlocks(Protocol):
    """Blocks of a group some of whose ranks have memories of their own (`KVMemory.spread`).

    Holders are numbered, the process of rank 0 with its host's ranks first; the others do what they are asked
    soon and in order. Any thread may call, and none waits for a network. Futures cannot be cancelled.
    """

    @property
    def holders(self) -> Holders:
        """Shares of each process with a memory of its own."""
        ...

    @property
    def devices(self) -> Sequence[str]:
        """UUID of each holder's GPU, empty for host memory."""
        ...

    @property
    def mapped(self) -> MappedRanks:
        """The other holders, where memories are mapped."""
        ...

    def listen(self, secret: bytes, on_event: Callable[[int, RankEvent], None]) -> list[Future[str]]:
        """Have ranks listen for shares of sessions whose tokens `secret` makes; their endpoints will follow.

        `on_event` gets holder and event, on another thread. Call it once.
        """
        ...

    def place_share(self, holder: int, staged: int, block: int, pieces: Pieces) -> None:
        """Have a rank write a share it keeps to a block, before any later step."""
        ...

    def drop_share(self, holder: int, staged: int) -> None:
        """Have a rank forget a share that it keeps."""
        ...

    def end_session(self, holder: int, session: int) -> None:
        """Have a rank close the data connections of a session."""
        ...

    def open_pushes(self, holder: int, channel: int, targets: Sequence[PushTarget]) -> Future[None]:
        """Have a rank connect; the result is a TransportError where it cannot."""
        ...

    def push_share(self, holder: int, channel: int, block: int, ref: GrantRef, index: int) -> Future[bytes]:
        """Have a rank send its shares of a block to all targets of a channel.

        The result comes when the kernel has the bytes: the digests in the order of the targets, one after the
        other, or a TransportError.
        """
        ...

    def close_pushes(self, holder: int, channel: int) -> None:
        """Have a rank close the connections of a channel, whatever it waits for."""
        ...

    def fail(self, error: BaseException) -> None:
        """End the group, one of whose ranks does not do what it is asked."""
        ...
