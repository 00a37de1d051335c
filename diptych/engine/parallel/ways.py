"""The communicators of a group: which processes meet in each, and in what order they join. Pure.

Every process joins those that it is a member of in the order of `ways_of`. As the order is one for all, none
waits for a process that waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from diptych.engine.parallel.communicator import Alone, Communicator
from diptych.engine.parallel.pipeline import Links
from diptych.engine.parallel.stages import Grid


@dataclass(frozen=True)
class Way:
    """Processes that exchange numbers, by their number in the group; the first is rank 0 there."""

    kind: Literal["ranks", "hop", "home"]
    """Ranks of one stage, two stages in a row (pipeline.py), or the last and the first."""
    members: tuple[int, ...]


def ways_of(grid: Grid) -> tuple[Way, ...]:
    """Return all communicators of a group of more than one process."""
    ranks, stages = range(grid.ranks), range(grid.stages)
    ways = []
    if len(ranks) > 1:
        ways += [Way("ranks", tuple(stage * len(ranks) + rank for rank in ranks)) for stage in stages]
    for stage in stages[1:]:
        begin = stage * len(ranks)
        ways += [Way("hop", (begin + rank, begin - len(ranks) + rank)) for rank in ranks]
    if len(stages) > 1:
        ways.append(Way("home", (0, (len(stages) - 1) * len(ranks))))
    return tuple(ways)


def own_ways(number: int, grid: Grid) -> list[Way]:
    """Return the communicators that process `number` is a member of."""
    return [way for way in ways_of(grid) if number in way.members]


def links_of(number: int, joined: Sequence[tuple[Way, Communicator]]) -> Links:
    """Return the ends of process `number` by their use."""
    links: dict[str, Communicator] = {"ranks": Alone()}
    for way, communicator in joined:
        name = way.kind
        if name == "hop":
            links["before" if way.members[0] == number else "after"] = communicator
        else:
            links[name] = communicator
    return Links(**links)
