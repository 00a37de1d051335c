"""Orders of rank 0 to another rank, over two pipes.

plans    StepPlan; where torch computes, answered with an empty message when the rank has written its share
control  StartRank first, answered with RankReady or RankFailed; then MapFile, AllocateShare, RegisterPool and
         DropMemory, of which all but the last are answered with None, or with RankFailed

A rank on another host has a memory of its own. Between plans it gets WriteShare and CopyBlock, and carries
them out in this order; it answers none. A third connection brings ReadShare, which it answers with the digest
of the bytes and the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from diptych.engine.dtype import Precision
from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.parallel.gloo_communicator import LOOPBACK
from diptych.engine.parallel.stages import Grid
from diptych.engine.parallel.step_plan import StepPlan
from diptych.engine.parallel_model import Dealing
from kvtransfer.transports.base import Welcome


@dataclass(frozen=True)
class StartRank:
    """Share of the model that a rank computes, and the group that it joins."""

    number: int
    """Number of the process in its group (diptych/engine/parallel/stages.py)."""
    grid: Grid
    model: Path
    precision: Precision
    native: bool
    """True where the native step computes, False where torch does."""
    dealing: Dealing
    max_context: int | None
    threads: int
    device: str
    store_port: int
    """Port of the group's store at `store_host`."""
    store_host: str = LOOPBACK
    host: str = LOOPBACK
    """Address at which this process exchanges numbers with the others, where they do so over a network."""
    across_hosts: bool = False
    """True if some ranks are on another host: no memory is common to all."""
    files_digest: bytes = b""
    """Digest of the model's files (same_files.py) that a rank of another host must have as well."""


@dataclass(frozen=True)
class RankReady:
    """Answer of a rank that has loaded its weights."""

    weight_bytes: int


@dataclass(frozen=True)
class RankFailed:
    """Answer of a rank that could not do what was asked."""

    why: str


@dataclass(frozen=True)
class MapFile:
    """Order to map the file whose descriptor follows as memory `number`."""

    number: int
    layout: KVLayout
    num_blocks: int


@dataclass(frozen=True)
class RegisterPool:
    """Order to register with a decode worker, and to map its pool as memory `number`."""

    number: int
    welcome: Welcome


@dataclass(frozen=True)
class DropMemory:
    """Order to unmap a memory that no later plan names."""

    number: int


@dataclass(frozen=True)
class AllocateShare:
    """Order to allocate this rank's share of `num_blocks` blocks of `layout`, as memory `number`."""

    number: int
    layout: KVLayout
    num_blocks: int


@dataclass(frozen=True)
class WriteShare:
    """Bytes of this rank's share of a block, which a handoff brought."""

    number: int
    block: int
    digest: bytes
    payload: bytes


@dataclass(frozen=True)
class CopyBlock:
    """Order to copy one block over another."""

    number: int
    src: int
    dst: int


@dataclass(frozen=True)
class ReadShare:
    """Question for this rank's share of a block, once it has carried out so many writes and copies."""

    number: int
    block: int
    after: int


Order = StartRank | MapFile | AllocateShare | RegisterPool | DropMemory
Planned = StepPlan | WriteShare | CopyBlock


def share_digest(payload: bytes | bytearray | memoryview) -> bytes:
    """Return the 16 bytes that go with a share of a block, against faults on its way."""
    return xxhash.xxh3_128(payload).digest()
