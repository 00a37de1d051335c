"""The routes of a block between two groups: which process sends which heads of which layers to which. Pure.

Each process with a memory of its own is a holder of shares. Sender i and receiver j have a route where both
hold a head of a layer; one that several senders hold (parts that read one KV head) is sent by the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from diptych.engine.parallel.kv_shares import KVShare

Holders = Sequence[Sequence[KVShare]]
"""Shares of each process with a memory of its own."""
Routes = Mapping[tuple[int, int], tuple[KVShare, ...]]
"""Shares that sender i has for receiver j, by (i, j) in ascending order; no entry where there are none."""


def kv_routes(senders: Holders, receivers: Holders) -> Routes:
    """Return the routes by which every receiver gets each head of each of its layers once.

    Raises ValueError where no sender has what a receiver holds.
    """
    routes: dict[tuple[int, int], tuple[KVShare, ...]] = {}
    for target, held in enumerate(receivers):
        missing = _cells(held)
        for source, offered in enumerate(senders):
            if common := missing & _cells(offered):
                routes[source, target] = tuple(_merged(common))
                missing -= common
        if missing:
            layer, head = min(missing)
            raise ValueError(f"no rank of the other worker has head {head} of layer {layer}")
    return dict(sorted(routes.items()))


def within(share: KVShare, holder: KVShare) -> KVShare:
    """Return a part of `holder`'s share by its place in a memory that holds that share alone."""
    return KVShare(_moved(share.layers, holder.layers.start), _moved(share.heads, holder.heads.start))


def _moved(numbers: range, by: int) -> range:
    return range(numbers.start - by, numbers.stop - by)


def _cells(shares: Sequence[KVShare]) -> set[tuple[int, int]]:
    """Return all (layer, head) of some shares."""
    return {(layer, head) for share in shares for layer in share.layers for head in share.heads}


def _merged(cells: set[tuple[int, int]]) -> Iterator[KVShare]:
    """Yield shares that are the given cells: runs of heads, of layers in a row that have the same ones."""
    begun: dict[tuple[int, int], int] = {}
    for layer in range(min(cells)[0], max(cells)[0] + 2):
        runs = set(_runs(sorted(head for at, head in cells if at == layer)))
        for run in sorted(begun.keys() - runs):
            yield KVShare(range(begun.pop(run), layer), range(*run))
        for run in runs - begun.keys():
            begun[run] = layer


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each run of numbers in a row."""
    for at, number in enumerate(numbers):
        if at == 0 or number != numbers[at - 1] + 1:
            begin = number
        if at + 1 == len(numbers) or numbers[at + 1] != number + 1:
            yield begin, number + 1
