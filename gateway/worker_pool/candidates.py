"""Workers as the router sees them for one prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """A prefill worker that is linked now, with its load as best known."""

    worker_id: str
    kv_format: str  # pairs work only where these are equal
    waiting_tokens: int
    memory_domain: str = ""  # equal for workers that compute in one memory; others copy blocks
    cached_blocks: int = 0  # leading blocks of this prompt in its own prefix cache, where blocks are copied
    pull_cost: float | None = (
        None  # of a token from a decode worker's pool, in tokens to compute; None = never
    )
    tiered_blocks: int = 0  # blocks of the prompt after the cached ones that its tiers hold
    load_cost: float = 0.0  # of a token that it loads from there, in tokens to compute


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    """A decode worker that is linked now, with its load as best known."""

    worker_id: str
    kv_format: str
    block_size: int  # tokens
    max_tokens: int  # prompt and output that one request may have there
    free_blocks: int  # free or evictable
    sequences: int  # running, or expected by this gateway
    cached_blocks: int = 0  # leading blocks of this prompt in its prefix cache
    memory_domain: str = ""  # as of prefill workers
    tiered_blocks: int = 0  # blocks of the prompt after these that it holds in tiers
    load_cost: float = 0.0  # of a token that it loads from there, in tokens to compute
