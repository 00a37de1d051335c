"""What a prefill gets for its ask: blocks to compute into, wherever they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.engine.kv.kv_memory import KVMemory
from kvtransfer.drivers.scratch import ScratchBlocks
from kvtransfer.protocol.messages import GrantRef, Key


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
