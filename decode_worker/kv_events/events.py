"""KV events in vLLM's form: arrays that begin with the name of the event, in a batch with its time.

    [time, [event, …], rank]
    ["BlockStored", hashes, parent's hash, token ids, block size, LoRA id, medium, LoRA name]
    ["BlockRemoved", hashes, medium]
    ["AllBlocksCleared"]

Source: vllm/distributed/kv_events.py (EventBatch, BlockStored, BlockRemoved, AllBlocksCleared, which msgspec
encodes as arrays). Readers make hashes of their own from the token ids; those in the events only join blocks
to their parents and to their removal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode_worker.kv_events.msgpack import Value, pack

POOL, TIER = "GPU", "CPU"
"""Media: the pool, on whatever device, and the tiers below it. Routers weigh blocks by these two names."""


@dataclass(frozen=True, slots=True)
class BlockTokens:
    """Content of a block: the key before it (b"" at a root), its tokens, the digest of its adapter."""

    parent: bytes
    token_ids: tuple[int, ...]
    adapter: bytes = b""


def block_hash(key: bytes) -> int:
    """Return a key as a hash of 64 bits, the size that all readers take."""
    return int.from_bytes(key[-8:], "big")


def stored(keys: Sequence[bytes], blocks: Sequence[BlockTokens], medium: str) -> Value:
    """Return the event of blocks that follow one another."""
    first = blocks[0]
    return [
        "BlockStored",
        [block_hash(key) for key in keys],
        block_hash(first.parent) if first.parent else None,
        [token for block in blocks for token in block.token_ids],
        len(first.token_ids),
        None,
        medium,
        first.adapter.hex() or None,
    ]


def removed(keys: Sequence[bytes], medium: str) -> Value:
    """Return the event of blocks that left a medium."""
    return ["BlockRemoved", [block_hash(key) for key in keys], medium]


CLEARED: Value = ["AllBlocksCleared"]


def pack_batch(seconds: float, events: Sequence[Value], rank: int) -> bytes:
    """Return the message of a batch; `seconds` since 1970, `rank` of the worker among those of its system."""
    return pack([seconds, events, rank])
