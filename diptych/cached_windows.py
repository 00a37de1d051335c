"""Lengths at which a cached prefix can be used, where layers with a sliding window have blocks of their own.

Workers grant by it and gateways estimate by it. A place is a stretch of `block_size` tokens; a prefix of N
places can be used if its full blocks are cached, and the windowed blocks of the last `reach` places before N.
Data and plain functions: imports nothing of Diptych.
"""

from collections.abc import Callable, Sequence
from typing import Final

_FLIPPED: Final = 0x80


def window_mark(key: bytes) -> bytes:
    """Return the key that is cached while all windowed blocks of a place are; `key` is its full block's."""
    return key[:-1] + bytes((key[-1] ^ _FLIPPED,))


def usable_places(keys: Sequence[bytes], end: int, reach: int, holds: Callable[[bytes], bool]) -> int:
    """Return the length of the longest prefix that can be used, in places, at most `end`.

    Args:
        keys: those of the places' full blocks, at least `end` of them.
        end: leading places whose full blocks are cached.
        reach: places before a prefix's end whose windowed blocks the next token reads.
        holds: whether a mark is cached.
    """
    found, run = end, 0
    for place in range(end - 1, -1, -1):
        if run == reach:
            break
        if holds(window_mark(keys[place])):
            run += 1
        else:  # any longer prefix that reaches back to it lacks it, too
            found, run = place, 0
    return found
