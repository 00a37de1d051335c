"""The blocks of a prompt that a worker holds."""

from __future__ import annotations

from typing import NamedTuple


class Held(NamedTuple):
    """The leading blocks of a prompt that a worker holds: in its pool, and in tiers after these."""

    cached: int = 0
    tiered: int = 0


NOTHING = Held()
