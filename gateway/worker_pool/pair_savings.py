"""The prompt tokens that a pair of workers need not compute: plain values in, plain values out.

Where both compute in one memory, it is what the decode worker's pool holds. Where blocks are copied, the
prefill worker computes into blocks of its own, and starts from what it has cached itself. What only the
decode worker holds it may pull from there, which costs less than computing it, but something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.worker_pool.candidates import DecodeCandidate, PrefillCandidate

COMPUTE_COST = 1.0
"""Cost of computing a token, the unit of all costs: a pull that costs as much is not made."""


@dataclass(frozen=True, slots=True)
class PairSaving:
    """The leading blocks of a prompt that a pair need not compute."""

    blocks: int
    pulled: int
    """Number of them that the prefill worker takes from the decode worker's pool."""
    loaded: int = 0
    """Number of them that the decode worker loads from a tier first."""

    def compute_cost(
        self, tokens: int, block_size: int, pull_cost: float | None, load_cost: float = 0.0
    ) -> float:
        """Return the cost of a prompt of `tokens` tokens, in tokens to compute."""
        moved = self.pulled * block_size * (pull_cost or 0.0) + self.loaded * block_size * load_cost
        return tokens - self.blocks * block_size + moved


def pair_saving(tokens: int, prefill: PrefillCandidate, decode: DecodeCandidate) -> PairSaving:
    """Return what the pair saves of a prompt: at least one token is always computed, for its logits."""
    there = held_blocks(tokens, decode)
    if prefill.memory_domain == decode.memory_domain:
        return PairSaving(there, 0, loaded_blocks(there, decode))
    own = min(prefill.cached_blocks, (tokens - 1) // decode.block_size)
    if there <= own or prefill.pull_cost is None or prefill.pull_cost >= COMPUTE_COST:
        return PairSaving(own, 0)
    return PairSaving(there, there - own, loaded_blocks(there, decode))


def most_saved_tokens(
    tokens: int, prefill: Sequence[PrefillCandidate], decode: Sequence[DecodeCandidate]
) -> int:
    """Return the tokens that the best pair saves of a prompt of `tokens` tokens.

    Without a prefill worker these are the tokens that the best decode worker holds.
    """
    if not prefill:
        return max((held_blocks(tokens, d) * d.block_size for d in decode), default=0)
    pairs = ((p, d) for p in prefill for d in decode if p.kv_format == d.kv_format)
    return max((pair_saving(tokens, p, d).blocks * d.block_size for p, d in pairs), default=0)


def held_blocks(tokens: int, decode: DecodeCandidate) -> int:
    """Return the blocks of a prompt that the decode worker holds; one token is always computed."""
    return min(decode.cached_blocks + decode.tiered_blocks, (tokens - 1) // decode.block_size)


def loaded_blocks(held: int, decode: DecodeCandidate) -> int:
    """Return how many of the first `held` blocks of a prompt the decode worker has in a tier only."""
    return max(0, held - decode.cached_blocks)
