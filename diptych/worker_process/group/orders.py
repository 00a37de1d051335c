"""Orders of rank 0 to another rank, over two pipes.

plans    StepPlan; where torch computes, and in a step of the Triton backend that is not recorded, answered
         with an empty message when the rank has written its share. Recordings are answered so when made, and
         with the reason, in UTF-8, where they cannot be; DropRecording, PlaceAdapter and DropAdapter are not
         answered
control  StartRank first, answered with RankReady or RankFailed; then MapFile, AllocateShare, RegisterPool,
         CountBlocks, MeasureMemory, AllowAdapters, LoadAdapter and DropMemory, of which all but the last are
         answered: with None, CountBlocks with a CardRoom, MeasureMemory with a RankMemory, or with RankFailed

A rank on another host, or on a GPU, has memories of its own. Between plans it gets WriteShare, PlaceShare and
CopyBlock, and carries them out in this order; it answers none. Two more connections are:

blocks   ReadShare, answered with the digest of the bytes and the bytes; AwaitWrites, with an empty message
shares   ListenForShares, OpenPushes and PushShare, each answered with Answered when it is done, whatever
         comes meanwhile; ClosePushes, EndSession and DropShare; the other way ArrivedShare, SessionBroke.
         Where memories are mapped OfferMemory, CheckShares, MapTargets and CopyShares, answered likewise;
         NoteSource, FenceWriter and UnmapTargets; the other way SourceMapped, SourceDied
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.engine.batch import DecodeRecording
from diptych.engine.dtype import KVCacheDtype, Precision
from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.parallel.gloo_communicator import LOOPBACK
from diptych.engine.parallel.stages import Grid
from diptych.engine.parallel.step_plan import StepPlan
from diptych.engine.parallel_model import Dealing
from kvtransfer.protocol.messages import GrantRef, WriterId
from kvtransfer.transports.base import Welcome
from kvtransfer.transports.held_blocks import Pieces
from kvtransfer.transports.rank_data import PushTarget
from kvtransfer.transports.share_mapping import CheckRun, CopyRun, MapTarget

CONNECTIONS = ("plans", "control", "blocks", "shares")
"""Kinds of the connections to a rank of this host; the last two are for one with memories of its own."""


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
    holder: int = 0
    """Number of this process among those of the group that have memories of their own; 0: it maps those of
    rank 0.
    """
    share_host: str = LOOPBACK
    """Address at which such a process takes shares of blocks."""
    files_digest: bytes = b""
    """Digest of the model's files (same_files.py) that a rank of another host must have as well."""
    triton: bool = False
    """True where the Triton step computes."""
    kv_cache: KVCacheDtype = "auto"
    """Numbers of keys and values."""


@dataclass(frozen=True)
class RankReady:
    """Answer of a rank that has loaded its weights."""

    weight_bytes: int
    device: str = ""
    """UUID of its GPU, empty for host memory."""


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
class AllowAdapters:
    """Order to let steps have rows with adapters of rank up to `max_rank` in so many slots."""

    slots: int
    max_rank: int


@dataclass(frozen=True)
class LoadAdapter:
    """Order to prepare this rank's share of an adapter as `number`."""

    number: int
    pickled: bytes
    """The whole adapter (adapter_message.py)."""


@dataclass(frozen=True)
class PlaceAdapter:
    """Order to let the plans that follow find adapter `number` in a slot; None empties it."""

    slot: int
    number: int | None


@dataclass(frozen=True)
class DropAdapter:
    """Order to forget an adapter that lies in no slot and will lie in none."""

    number: int


@dataclass(frozen=True)
class PlanDecode:
    """Order to take the buffers of recorded decode steps of up to `max_batch` rows."""

    max_batch: int
    block_size: int


@dataclass(frozen=True)
class UseDecode:
    """Order to record decode steps over memory `number`."""

    number: int


@dataclass(frozen=True)
class RecordDecode:
    """Order to record one decode step: every rank records those that rank 0 asks for."""

    recording: DecodeRecording


@dataclass(frozen=True)
class PlanPrompts:
    """Order to take the buffers of recorded prompt steps of up to `most_tokens` tokens over memories of
    `layout`.
    """

    layout: KVLayout
    most_tokens: int


@dataclass(frozen=True)
class RecordPrompt:
    """Order to make one of the recordings that were planned: every rank makes those that rank 0 asks for."""

    number: int


@dataclass(frozen=True)
class DropRecording:
    """Order to forget a recording that some rank could not make."""

    order: RecordDecode | RecordPrompt
    why: str


@dataclass(frozen=True)
class CountBlocks:
    """Question for the room on this rank's GPU for its share of blocks of `layout`."""

    layout: KVLayout


@dataclass(frozen=True)
class MeasureMemory:
    """Question for what this rank's memory is taken by, where its worker has `num_blocks` blocks."""

    layout: KVLayout
    num_blocks: int


@dataclass(frozen=True)
class WriteShare:
    """Bytes of this rank's share of a block, which a handoff brought."""

    number: int
    block: int
    digest: bytes
    payload: bytearray


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


@dataclass(frozen=True)
class AwaitWrites:
    """Question whether this rank has carried out so many writes and copies, which it answers once it has."""

    number: int
    after: int


@dataclass(frozen=True)
class PlaceShare:
    """Order to write a share that this rank keeps to a block: pieces by their place in its memory."""

    number: int
    block: int
    staged: int
    pieces: Pieces


@dataclass(frozen=True)
class ListenForShares:
    """Order to listen for shares of blocks of memory `number`; the answer is the endpoint."""

    request: int
    number: int
    secret: bytes
    """Maker of the tokens that senders show."""


@dataclass(frozen=True)
class DropShare:
    """Order to forget a share that this rank keeps."""

    staged: int


@dataclass(frozen=True)
class EndSession:
    """Order to close the data connections of a session."""

    session: int


@dataclass(frozen=True)
class OpenPushes:
    """Order to connect to ranks of another worker; the answer is None."""

    request: int
    channel: int
    targets: Sequence[PushTarget]


@dataclass(frozen=True)
class PushShare:
    """Order to send this rank's shares of a block, once it has carried out so many writes and copies.

    The answer, digests in the order of the targets, comes when the kernel has the bytes.
    """

    request: int
    channel: int
    number: int
    block: int
    ref: GrantRef
    index: int
    after: int


@dataclass(frozen=True)
class ClosePushes:
    """Order to close the connections of a channel."""

    channel: int


@dataclass(frozen=True)
class Answered:
    """End of what was asked over the connection of shares."""

    request: int
    result: Any


@dataclass(frozen=True)
class OfferMemory:
    """Order to offer memory `number` to ranks of other workers; the answer is the endpoint."""

    request: int
    number: int
    secret: bytes
    """Maker of the tokens that they show."""


@dataclass(frozen=True)
class NoteSource:
    """Word that rank 0 knows of a process which has mapped this rank's memory."""

    source: WriterId


@dataclass(frozen=True)
class FenceWriter:
    """Order to kill the processes of a writer, by its number, that map this rank's memory."""

    writer: int


@dataclass(frozen=True)
class CheckShares:
    """Question for the digests of shares that were written to this rank's memory."""

    request: int
    run: CheckRun


@dataclass(frozen=True)
class MapTargets:
    """Order to map memories of ranks of another worker; the answer is None."""

    request: int
    channel: int
    targets: tuple[MapTarget, ...]


@dataclass(frozen=True)
class CopyShares:
    """Order to copy this rank's shares of blocks to all targets, once it has carried out so many writes and
    copies. The answer, the digests, comes when they lie there.
    """

    request: int
    channel: int
    number: int
    run: CopyRun
    after: int


@dataclass(frozen=True)
class UnmapTargets:
    """Order to unmap the memories of a channel."""

    channel: int


AdapterQuestion = AllowAdapters | LoadAdapter
Order = (
    StartRank
    | MapFile
    | AllocateShare
    | RegisterPool
    | CountBlocks
    | MeasureMemory
    | DropMemory
    | AdapterQuestion
)
Recording = PlanDecode | UseDecode | RecordDecode | PlanPrompts | RecordPrompt
AdapterOrder = PlaceAdapter | DropAdapter
BlockOrder = WriteShare | PlaceShare | CopyBlock
Planned = StepPlan | Recording | DropRecording | AdapterOrder | BlockOrder
MappingOrder = OfferMemory | NoteSource | FenceWriter | CheckShares | MapTargets | CopyShares | UnmapTargets
ShareOrder = ListenForShares | OpenPushes | PushShare | ClosePushes | EndSession | DropShare | MappingOrder
