"""Table with a line for each revision, and the ratio of the second to the first within each round."""

from __future__ import annotations

from collections.abc import Sequence

from lab.revisions.measure import Turn
from lab.revisions.tree import Tree
from lab.spread import median_and_range, stolen_in_turns

_COLUMNS = (("tokens/s", "tokens_per_s", 1), ("CPU ms a token", "cpu_ms_per_token", 3))


def markdown(trees: Sequence[Tree], rounds: Sequence[Sequence[Turn]], title: str) -> str:
    """Return the table: medians over the rounds (smallest–largest)."""
    lines = [
        f"{title}; medians of {len(rounds)} rounds, each revision once in each (smallest–largest).",
        "",
        f"| revision | {' | '.join(heading for heading, _, _ in _COLUMNS)} |",
        "|---|---|---|",
    ]
    for index, tree in enumerate(trees):
        cells = [
            median_and_range([getattr(r[index], name) for r in rounds], digits)
            for _, name, digits in _COLUMNS
        ]
        lines.append(f"| {tree.name} ({tree.commit}) | {' | '.join(cells)} |")
    ratios = [median_and_range([ratio(r, name) for r in rounds], 3) for _, name, _ in _COLUMNS]
    lines.append(f"| second ÷ first, within each round | {' | '.join(ratios)} |")
    return "\n".join([*lines, "", stolen_in_turns([turn.steal_share for r in rounds for turn in r])])


def ratio(turns: Sequence[Turn], name: str) -> float:
    first, second = (float(getattr(turn, name)) for turn in turns)
    return second / first
