"""What the decode side tells its owner, and the numbers that it shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.engine.kv.kv_memory import KVMemory
from diptych.worker.v1 import work_pb2
from kvtransfer.drivers.scratch import ScratchBlocks
from kvtransfer.protocol.messages import GrantRef, Key


@dataclass(frozen=True, slots=True)
class Ready:
    """Verified blocks. The references to all of `block_ids` belong to the receiver of this."""

    key: Key
    block_ids: list[int]
    """Cached prefix first; beyond the blocks of `num_tokens` only what was reserved."""
    cached_tokens: int
    """Tokens whose KV the decode pool already held; whole blocks."""
    num_tokens: int
    """Tokens whose KV is in the blocks: all that were prefilled."""
    first_tokens: tuple[work_pb2.SampledToken, ...]
    """Sampled by the prefill worker: one for each choice in order, or what a beam search starts from."""
    times: work_pb2.PhaseTimes
    """The prefill worker's phases, and kv_receive."""
    in_place: bool
    """Whether the prefill worker computed straight into the blocks."""
    transport: str
    """The name of what brought them."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a heartbeat says of this process' engine."""

    progress: int = 0
    """Grows with every step."""
    busy: bool = False
    """Whether there is a step to be made."""
    late_s: float = 0.0
    """By how much the running step is past its predicted end."""

    def to_proto(self) -> work_pb2.Heartbeat:
        beat = work_pb2.Heartbeat(progress=self.progress, busy=self.busy)
        if self.late_s > 0:
            beat.late.FromNanoseconds(round(self.late_s * 1e9))
        return beat

    @staticmethod
    def late_s_of(beat: work_pb2.Heartbeat) -> float:
        """What a peer's beat says of its step, in seconds."""
        return beat.late.ToNanoseconds() / 1e9 if beat.HasField("late") else 0.0


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """The decode side of the handoff in numbers."""

    writers: int
    """Prefill processes with a link, or with blocks that they may still write."""
    grants: int
    waiting_asks: int
    quarantined_blocks: int
    quarantine_age_s: float
    """Of the oldest quarantined grant; 0 when there is none."""
    stale_messages: int
    fenced: int
    """Processes that had to be cut off since the start."""


@dataclass(frozen=True, slots=True, eq=False)
class GrantedBlocks:
    """Blocks to compute into. Keep it until `commit` or `stop`: it keeps the memory mapped."""

    key: Key
    memory: KVMemory
    """Where `block_table` points: the decode worker's pool, or scratch."""
    block_table: list[int]
    """Blocks for all of the attempt's tokens."""
    computed_tokens: int
    """Tokens whose KV is in `memory` already: compute from here."""
    cached_tokens: int
    """Tokens whose KV the decode worker already held."""
    ref: GrantRef
    scratch: ScratchBlocks | None
    """Set when the blocks are copied."""
    target_table: Sequence[int]
    """The granted blocks, in the decode worker's pool."""
    transport: str
    """The name of what the blocks are handed over by."""
    keep: bool
    """Whether the blocks in scratch may be used again, once they are complete."""
