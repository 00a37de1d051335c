"""Values that the drivers exchange with the two worker programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.tiers.loaded import Loaded
from diptych.engine.kv.window_table import PromptWindow
from diptych.worker.v1 import work_pb2
from kvtransfer.drivers.scratch import ScratchBlocks
from kvtransfer.protocol.messages import GrantRef, Key


@dataclass(frozen=True, slots=True)
class Ready:
    """Verified blocks of a finished handoff. The references to all blocks belong to the recipient."""

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
    """True if the prefill worker computed straight into the blocks."""
    transport: str
    """Name of the transport that brought them."""
    window: PromptWindow | None = None
    """Blocks of the layers with a window, where these have blocks of their own."""
    drafted: bool = True
    """False if the writer has another drafter, so that the blocks lack this worker's segment."""

    @property
    def held(self) -> list[int]:
        """Return all blocks."""
        return self.block_ids if self.window is None else [*self.block_ids, *self.window.held]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """State of this process' engine, as a heartbeat carries it."""

    progress: int = 0
    """Counter of the engine's steps."""
    busy: bool = False
    """True while there is a step to run."""
    late_s: float = 0.0
    """Seconds by which the running step is past its predicted end."""

    def to_proto(self) -> work_pb2.Heartbeat:
        """Return the message for the wire."""
        beat = work_pb2.Heartbeat(progress=self.progress, busy=self.busy)
        if self.late_s > 0:
            beat.late.FromNanoseconds(round(self.late_s * 1e9))
        return beat

    @staticmethod
    def late_s_of(beat: work_pb2.Heartbeat) -> float:
        """Return the seconds by which the step of a peer is late, read from its heartbeat."""
        return beat.late.ToNanoseconds() / 1e9 if beat.HasField("late") else 0.0


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """Counts of the decode side of the handoff."""

    writers: int
    """Prefill processes with a link, or with blocks that they may still write."""
    grants: int
    waiting_asks: int
    quarantined_blocks: int
    quarantine_age_s: float
    """Age in seconds of the oldest quarantined grant; 0 without one."""
    stale_messages: int
    fenced: int
    """Processes that were fenced since the start."""


@dataclass(frozen=True, slots=True, eq=False)
class GrantedBlocks:
    """Blocks to compute a prefill into. Keep it until `commit` or `stop`: it keeps the memory mapped."""

    key: Key
    memory: KVMemory
    """Memory of the blocks in `block_table`: the decode worker's pool, or scratch."""
    block_table: list[int]
    """Blocks for all of the attempt's tokens, in order: of all layers but those in `window`."""
    computed_tokens: int
    """Tokens whose KV is in `memory` already: compute from here."""
    cached_tokens: int
    """Tokens whose KV the decode worker already held."""
    ref: GrantRef
    scratch: ScratchBlocks | None
    """Blocks of this worker that are copied; None where it computes in place."""
    target_table: Sequence[int]
    """The granted blocks, in the decode worker's pool."""
    transport: str
    """Name of the transport."""
    keep: bool
    """True if the scratch blocks may enter the prefix cache once they are complete."""
    window: PromptWindow | None = None
    """Blocks of the layers with a window in `memory`, where these have blocks of their own."""
    target_window: PromptWindow | None = None
    """Windowed blocks of the grant."""
    pull_s: float = 0.0
    """Seconds for which cached blocks were pulled from the decode worker."""

    @property
    def loaded(self) -> Loaded:
        """Blocks that came from this worker's tiers, before the ask."""
        loaded = None if self.scratch is None else self.scratch.loaded
        return Loaded() if loaded is None else loaded
