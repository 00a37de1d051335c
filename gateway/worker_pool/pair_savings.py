"""The prompt tokens that a pair of workers need not compute: plain values in, plain values out.

Where both compute in one memory, it is what the decode worker's pool holds. Where blocks are copied, the
prefill worker computes into blocks of its own, and starts from what it has cached itself, then from what it
reads from its tiers. What only the decode worker holds it may pull from there. Both cost less than computing,
but something.
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
    read: int = 0
    """Number of them that the prefill worker loads from a tier into blocks of its own."""

    def compute_cost(
        self,
        tokens: int,
        block_size: int,
        pull_cost: float | None,
        load_cost: float = 0.0,
        read_cost: float = 0.0,
    ) -> float:
        """Return the cost of a prompt of `tokens` tokens, in tokens to compute.

        `load_cost` and `read_cost` are those of a token that the decode and the prefill worker load: both do
        it at the same time, before the handoff.
        """
        waited = max(self.loaded * load_cost, self.read * read_cost)
        return tokens - block_size * (self.blocks - self.pulled * (pull_cost or 0.0) - waited)


def pair_saving(tokens: int, prefill: PrefillCandidate, decode: DecodeCandidate) -> PairSaving:
    """Return what the pair saves of a prompt: at least one token is always computed, for its logits."""
    there = held_blocks(tokens, decode)
    if prefill.memory_domain == decode.memory_domain:
        return PairSaving(there, 0, loaded_blocks(there, decode))
    own = min(prefill.cached_blocks + prefill.tiered_blocks, (tokens - 1) // decode.block_size)
    read = max(0, own - prefill.cached_blocks)
    if there <= own or prefill.pull_cost is None or prefill.pull_cost >= COMPUTE_COST:
        return PairSaving(own, 0, read=read)
    return PairSaving(there, there - own, loaded_blocks(there, decode), read)


def most_saved_tokens(
    tokens: int, prefill: Sequence[PrefillCandidate], decode: Sequence[DecodeCandidate]
) -> int:
    """Return the tokens that the best pair saves of a prompt of `tokens` tokens.

    Without a prefill worker these are the tokens that the best decode worker holds. Time grows with the
    workers, not with their pairs: of the decode workers of one memory only the one that holds most can be in
    the best pair, and each prefill worker needs the one of its own memory and the best of the others.
    """
    if not prefill:
        return max((held_blocks(tokens, d) * d.block_size for d in decode), default=0)
    holders: dict[tuple[str, int], dict[str, DecodeCandidate]] = {}
    for one in decode:
        memories = holders.setdefault((one.kv_format, one.block_size), {})
        known = memories.get(one.memory_domain)
        if known is None or held_blocks(tokens, one) > held_blocks(tokens, known):
            memories[one.memory_domain] = one
    most = 0
    for (kv_format, block_size), memories in holders.items():
        best = sorted(memories.values(), key=lambda one: -held_blocks(tokens, one))[:2]
        for source in prefill:
            if source.kv_format == kv_format:
                near = memories.get(source.memory_domain)
                for target in best if near is None else (*best, near):
                    most = max(most, pair_saving(tokens, source, target).blocks * block_size)
    return most


def held_blocks(tokens: int, decode: DecodeCandidate) -> int:
    """Return the blocks of a prompt that the decode worker holds; one token is always computed."""
    return min(decode.cached_blocks + decode.tiered_blocks, (tokens - 1) // decode.block_size)


def loaded_blocks(held: int, decode: DecodeCandidate) -> int:
    """Return how many of the first `held` blocks of a prompt the decode worker has in a tier only."""
    return max(0, held - decode.cached_blocks)
