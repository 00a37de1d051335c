"""Routes of blocks between groups of any degrees: each holder gets each head of each of its layers once."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from diptych.engine.parallel.kv_routes import Holders, kv_routes, within
from diptych.engine.parallel.kv_shares import KVShare

LAYERS, HEADS = 5, 3


def group(ranks: int, stages: int = 1, here: int = 1, heads: int = HEADS) -> Holders:
    """Return the holders of a group whose first `here` processes have one memory; heads are dealt unevenly,
    and several ranks have one where there are more ranks.
    """
    borders = [stage * LAYERS // stages for stage in range(stages + 1)]
    shares = []
    for first, end in pairwise(borders):
        for rank in range(ranks):
            begin, stop = rank * heads // ranks, -(-(rank + 1) * heads // ranks)
            shares.append(KVShare(range(first, end), range(begin, stop)))
    return (tuple(shares[:here]), *((share,) for share in shares[here:]))


GROUPS = [
    group(1),
    group(2),
    group(3),
    group(4),
    group(6),
    group(2, 2),
    group(2, 2, here=3),
    group(1, 3),
    group(4, 1, here=2),
]


def cells(shares: tuple[KVShare, ...]) -> list[tuple[int, int]]:
    return [(layer, head) for share in shares for layer in share.layers for head in share.heads]


@pytest.mark.parametrize("senders", GROUPS)
@pytest.mark.parametrize("receivers", GROUPS)
def test_each_holder_gets_each_of_its_heads_once_from_one_that_has_it(
    senders: Holders, receivers: Holders
) -> None:
    routes = kv_routes(senders, receivers)
    assert list(routes) == sorted(routes)
    for target, held in enumerate(receivers):
        got = Counter(cell for (_, to), pieces in routes.items() if to == target for cell in cells(pieces))
        assert got == Counter({*cells(tuple(held))})
    for (source, _), pieces in routes.items():
        assert {*cells(pieces)} <= {*cells(tuple(senders[source]))}


def test_heads_that_nobody_has_are_an_error() -> None:
    with pytest.raises(ValueError, match="head 2 of layer 0"):
        kv_routes(group(2, heads=2), group(1, heads=3))


def test_equal_degrees_pair_ranks() -> None:
    assert list(kv_routes(group(3), group(3))) == [(0, 0), (1, 1), (2, 2)]


def test_a_share_has_its_place_in_the_memory_of_its_holder() -> None:
    held, share = KVShare(range(2, 5), range(1, 3)), KVShare(range(3, 4), range(2, 3))
    assert within(share, held) == KVShare(range(1, 2), range(1, 2))
