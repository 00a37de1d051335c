"""Shares of blocks between memories that are mapped: what is copied, and by whom it is known.

token   writer number, source, and a MAC over both and the pid: who registers is known without a word from
        the process that admitted it, and no other process can use it
digest  of a share as on sockets (rank_data.py), over a hash of its bytes: xxh3 on a host, on a GPU the one
        that the copying kernel makes on its way
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch

from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.runtime.internal_tls import InternalTls
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports.held_blocks import Pieces

_NAMED = struct.Struct("<QI")
_PID = struct.Struct("<I")
SOURCE_TOKEN_BYTES = _NAMED.size + 32


def source_token(secret: bytes, writer: int, source: int, pid: int) -> bytes:
    """Return what proves that a process is source `source` of the writer of that number."""
    named = _NAMED.pack(writer, source)
    return named + hmac.digest(secret, named + _PID.pack(pid), "sha256")


def read_source_token(secret: bytes, token: bytes, pid: int) -> WriterId | None:
    """Return the name of the source that the process `pid` is; None if `secret` made no such token."""
    if len(token) != SOURCE_TOKEN_BYTES:
        return None
    writer, source = _NAMED.unpack(token[: _NAMED.size])
    if not hmac.compare_digest(token, source_token(secret, writer, source, pid)):
        return None
    return source_name(writer, source)


def source_name(writer: int, source: int) -> WriterId:
    """Return the name of one process of a writer among those that map a memory."""
    return WriterId(str(source), writer)


@dataclass(frozen=True, slots=True)
class ShareRun:
    """Shares of consecutive blocks of one grant, from index `first` of its table on."""

    ref: GrantRef
    first: int
    memory: KVMemory
    block_ids: Sequence[int]
    pieces: Pieces
    """Pieces by their place in `memory`'s blocks."""
    target: KVMemory
    target_ids: Sequence[int]
    target_pieces: Pieces
    """Places of these pieces in `target`'s blocks."""
    computed: torch.cuda.Event | None = None
    """Event after which the blocks are computed; None: they are."""


@dataclass(frozen=True, slots=True)
class MapTarget:
    """Memory of a decode rank that a process is to map: an `Admission`, and what it writes there."""

    target: int
    """Number of the rank among the holders of its worker's blocks."""
    address: str
    endpoint: str
    token: bytes
    layout: KVLayout
    """Layout of the rank's share of a block."""
    num_blocks: int
    pieces: Pieces
    """Pieces by their place in the writing process' blocks."""
    target_pieces: Pieces
    """Places of these pieces in the rank's blocks."""
    tls: InternalTls | None = None
    role: str = "decode"


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Blocks whose shares a process is to copy to all the targets that it has mapped."""

    ref: GrantRef
    first: int
    block_ids: tuple[int, ...]
    target_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckRun:
    """Blocks that a writer says to have written; a rank takes the digests of its shares of them."""

    writer: int
    ref: GrantRef
    first: int
    block_ids: tuple[int, ...]
    sources: tuple[tuple[int, Pieces], ...]
    """Pieces that each source writes here, by their place in this rank's blocks."""


@dataclass(frozen=True, slots=True)
class SourceMapped:
    """A source has mapped a rank's memory; it waits until rank 0 has noted that."""

    source: WriterId


@dataclass(frozen=True, slots=True)
class SourceDied:
    """Proof that a source which had mapped a rank's memory writes no more."""

    source: WriterId


SourceEvent = SourceMapped | SourceDied


class SourceListener(Protocol):
    """Callback for what sources do, by the holder whose memory it is. Any thread may call it."""

    def __call__(self, holder: int, event: SourceEvent) -> None: ...


class MappedRanks(Protocol):
    """The other holders of a group's blocks, as far as memories are mapped; see `RankBlocks`."""

    def offer(self, secret: bytes, on_event: SourceListener) -> list[Future[str]]:
        """Have ranks offer their memories to sources whose tokens `secret` makes; endpoints will follow."""
        ...

    def note_source(self, holder: int, source: WriterId) -> None:
        """Let a source go on that has mapped a rank's memory."""
        ...

    def fence_writer(self, holder: int, writer: int) -> None:
        """Have a rank kill the sources of a writer that map its memory."""
        ...

    def check_shares(self, holder: int, run: CheckRun) -> Future[list[bytes]]:
        """Have a rank take digests: of every block those of all sources, in a row, each block's after the
        other's. A TransportError where a source has not written them.
        """
        ...

    def map_targets(self, holder: int, channel: int, targets: Sequence[MapTarget]) -> Future[None]:
        """Have a rank map memories of another worker; the result is a TransportError where it cannot."""
        ...

    def copy_shares(self, holder: int, channel: int, run: CopyRun) -> Future[list[bytes]]:
        """Have a rank copy its shares of blocks to all targets of a channel.

        The result comes when they lie there: of every target the digests of all blocks, each target's after
        the other's. A TransportError where one could not be copied.
        """
        ...

    def unmap_targets(self, holder: int, channel: int) -> None:
        """Have a rank unmap the memories of a channel, after the copies before."""
        ...
