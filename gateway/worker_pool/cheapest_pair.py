"""Search for the cheapest pair of workers in time linear in their number: plain values in, plain values out.

The cost of a pair has a part that both decide together, since what the decode worker holds is worth more or
less to a prefill worker, and a part of the decode worker alone. For the first part decode workers with the
same blocks of the prompt are alike, and most have none: each such group needs one look at every prefill
worker. Workers that share a memory are the exception, and each decode worker looks at its own neighbours.

Pairs of equal cost are decided by a hash of (session or request, worker), the decode worker's first: a
session stays where it was, and several gateways with the same view do not all send to the first of the list.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gateway.worker_pool.candidates import DecodeCandidate, PrefillCandidate
from gateway.worker_pool.pair_savings import PairSaving, held_blocks, loaded_blocks, pair_saving

QUEUED_TOKEN_COST = 1.0  # a token that waits already is computed first
SEQUENCE_COST = 24.0  # tokens of prefill that one more neighbour in the decode batch is worth
MISSING_TOKEN_COST = 4.0  # waiting for other requests' blocks is worse than recomputing

Pair = tuple[PrefillCandidate, DecodeCandidate]
_Rank = tuple[float, bytes, str]
"""Order of prefill workers for one decode worker: cost, hash, id."""


def shared_cost(tokens: int, prefill: PrefillCandidate, decode: DecodeCandidate) -> float:
    """Return the part of a pair's cost that both decide, for a prompt of `tokens` tokens."""
    saving = pair_saving(tokens, prefill, decode)
    compute = saving.compute_cost(
        tokens, decode.block_size, prefill.pull_cost, decode.load_cost, prefill.load_cost
    )
    return compute + QUEUED_TOKEN_COST * prefill.waiting_tokens


def decode_cost(tokens: int, decode: DecodeCandidate) -> float:
    """Return the part of a pair's cost that its decode worker decides alone."""
    held = held_blocks(tokens, decode)
    needed = -(-tokens // decode.block_size) - held + loaded_blocks(held, decode)
    missing = max(0, needed - decode.free_blocks) * decode.block_size
    return SEQUENCE_COST * decode.sequences + MISSING_TOKEN_COST * missing


def pair_cost(tokens: int, prefill: PrefillCandidate, decode: DecodeCandidate) -> float:
    """Return the cost of a pair, in tokens to compute."""
    return shared_cost(tokens, prefill, decode) + decode_cost(tokens, decode)


def tie_break(affinity: str, worker_id: str) -> bytes:
    """Return the bytes by which equal workers are ordered for a session or request."""
    return hashlib.blake2b(f"{affinity}\0{worker_id}".encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class Found:
    """The cheapest pair, and what it is to be compared with."""

    pair: Pair
    cost: float
    saving: PairSaving
    only: bool  # there is no other pair
    saves_most: bool  # no pair saves more blocks, and some save fewer


def cheapest_pair(
    affinity: str, tokens: int, prefill: Sequence[PrefillCandidate], decode: Sequence[DecodeCandidate]
) -> Found | None:
    """Return the cheapest pair for a prompt of `tokens` tokens; None where no two work together."""
    sources: defaultdict[str, list[PrefillCandidate]] = defaultdict(list)
    for one in prefill:
        sources[one.kv_format].append(one)
    groups: defaultdict[tuple[object, ...], list[DecodeCandidate]] = defaultdict(list)
    for target in decode:
        if target.kv_format in sources:
            groups[_alike(tokens, target)].append(target)
    if not groups:
        return None
    ties = {one.worker_id: tie_break(affinity, one.worker_id) for one in prefill}
    searches = [_Group(tokens, targets, sources[targets[0].kv_format], ties) for targets in groups.values()]
    cost, _, _, _, source, target = min(
        (pair_rank + decode_cost(tokens, to), tie_break(affinity, to.worker_id), tie, to.worker_id, by, to)
        for search in searches
        for to, (pair_rank, tie, _), by in search.best()
    )
    return _found(tokens, (source, target), cost, searches)


def _alike(tokens: int, decode: DecodeCandidate) -> tuple[object, ...]:
    held = held_blocks(tokens, decode)
    loaded = loaded_blocks(held, decode)
    # A worker's measured cost of loading is its own, and tells workers apart only where they load.
    return decode.kv_format, decode.block_size, held, loaded, decode.load_cost if loaded else 0.0


def _found(tokens: int, pair: Pair, cost: float, searches: Sequence[_Group]) -> Found:
    saving = pair_saving(tokens, *pair)
    blocks = [number for search in searches for number in search.saved_blocks()]
    pairs = sum(len(search.targets) * len(search.sources) for search in searches)
    most = min(blocks) < saving.blocks == max(blocks)
    return Found(pair, cost, saving, only=pairs == 1, saves_most=most)


@dataclass(slots=True)
class _Group:
    """Decode workers that are alike to every prefill worker outside of their memory."""

    tokens: int
    targets: list[DecodeCandidate]
    sources: list[PrefillCandidate]
    ties: dict[str, bytes]
    _by_domain: dict[str, DecodeCandidate] = field(init=False)
    """A decode worker of each memory."""
    _neighbours: dict[str, list[PrefillCandidate]] = field(init=False)

    def __post_init__(self) -> None:
        self._by_domain = {target.memory_domain: target for target in self.targets}
        self._neighbours = {domain: [] for domain in self._by_domain}
        for source in self.sources:
            if source.memory_domain in self._neighbours:
                self._neighbours[source.memory_domain].append(source)

    def best(self) -> Iterator[tuple[DecodeCandidate, _Rank, PrefillCandidate]]:
        """Yield each decode worker with its best prefill worker, and that one's rank."""
        elsewhere = self._best_elsewhere()
        for target in self.targets:
            here = self._neighbours[target.memory_domain]
            ranked = [(self._rank(source, target), source) for source in here]
            ranked += [(rank, one) for rank, one in elsewhere if one.memory_domain != target.memory_domain]
            rank, source = min(ranked, key=lambda pair: pair[0])
            yield target, rank, source

    def saved_blocks(self) -> Iterator[int]:
        """Yield the blocks that pairs of this group save, each number at least once."""
        for source in self.sources:
            for domain in (source.memory_domain, *_other(self._by_domain, source.memory_domain)):
                if domain in self._by_domain:
                    yield pair_saving(self.tokens, source, self._by_domain[domain]).blocks

    def _best_elsewhere(self) -> list[tuple[_Rank, PrefillCandidate]]:
        """Return the best prefill worker of the two best memories, as if blocks were copied from all."""
        best: dict[str, tuple[_Rank, PrefillCandidate]] = {}
        for source in self.sources:
            for domain in _other(self._by_domain, source.memory_domain):
                rank = self._rank(source, self._by_domain[domain])
                known = best.get(source.memory_domain)
                if known is None or rank < known[0]:
                    best[source.memory_domain] = rank, source
        return sorted(best.values(), key=lambda pair: pair[0])[:2]

    def _rank(self, source: PrefillCandidate, target: DecodeCandidate) -> _Rank:
        cost = shared_cost(self.tokens, source, target)
        return cost, self.ties[source.worker_id], source.worker_id


def _other(domains: Iterable[str], than: str) -> Iterator[str]:
    """Yield the first of `domains` that is not `than`, if there is one."""
    for domain in domains:
        if domain != than:
            yield domain
            return
