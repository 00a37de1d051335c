"""Large JSON put together from text, in turns with whatever else waits for the event loop.

`json.dumps` of everything at once would keep other requests' tokens for as long as it takes. What several
choices have in common is written once. All of it is ASCII, so that characters are bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from gateway.cooperative_yield import PORTION, Yielder, slices

BLOCK: Final = 64 * 1024  # bytes that go out in one write, as long as pieces are small
_IDS_AS_ITEMS: Final = 16  # a token id is written in 60 ns


def inside(value: object) -> str:
    """Return the JSON of a string, a list or an object, without what encloses it."""
    return json.dumps(value)[1:-1]


def joined(parts: Iterable[str]) -> str:
    """Join the insides of lists to the inside of one list."""
    return ",".join(filter(None, parts))


async def ids_inside(ids: Sequence[int], turns: Yielder) -> str:
    """Return the inside of a list of token ids."""
    parts = []
    for some in slices(ids, PORTION * _IDS_AS_ITEMS):
        parts.append(inside(list(some)))
        await turns.done(len(some) // _IDS_AS_ITEMS)
    return joined(parts)


def blocks(wholes: Iterable[Sequence[str]]) -> Iterator[bytes]:
    """Yield what to write one by one: small texts together, large ones for themselves.

    None of ``wholes``, each of which is given in pieces, is in two of the blocks.
    """
    held: list[str] = []
    size = 0
    for pieces in wholes:
        held += pieces
        size += sum(map(len, pieces))
        if size >= BLOCK:
            yield "".join(held).encode()
            held, size = [], 0
    if held:
        yield "".join(held).encode()
