"""Dealing of a step's rows to parts, and so to ranks, which go on with them alone. Pure.

The rows of a part are the same at every degree, and so are the shapes of products with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.engine.parallel.parts import deal, parts_of_rank


@dataclass(frozen=True)
class RowShares:
    """Rows in a row that each part and each rank has, in order."""

    of_parts: tuple[range, ...]
    of_ranks: tuple[range, ...]

    def own_parts(self, rank: int) -> list[slice]:
        """Return the rows of each of a rank's parts, by their place among the rank's."""
        begin = self.of_ranks[rank].start
        numbers = parts_of_rank(len(self.of_parts), rank, len(self.of_ranks))
        return [slice(self.of_parts[at].start - begin, self.of_parts[at].stop - begin) for at in numbers]


def share_rows(rows: int, parts: int, ranks: int) -> RowShares:
    """Deal so many rows as evenly as can be; with fewer rows than parts some have none."""
    of_parts = tuple(deal(rows, parts))
    numbers = [parts_of_rank(parts, rank, ranks) for rank in range(ranks)]
    return RowShares(of_parts, tuple(range(of_parts[of[0]].start, of_parts[of[-1]].stop) for of in numbers))
