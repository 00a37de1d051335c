"""Table of what was measured: medians over rounds, and ratios within a round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from lab.peers.cells import Measurement, closed_loop

MEMORY, PSS = "memory", "weights_pss"
_Found = Mapping[tuple[str, str, int], Mapping[str, float | None]]
_FIGURES = (
    ("tokens/s", "output_throughput", 1),
    ("TTFT p50, ms", "median_ttft_ms", 0),
    ("ITL p50, ms", "median_itl_ms", 1),
)


def markdown(names: Sequence[str], clients: Sequence[int], measured: Iterable[Measurement], size: int) -> str:
    """Return rows of the first server's figures, the second one's, and the median ratio with its range."""
    found = {(one.cell.server, one.cell.load, one.cell.round): one.figures for one in measured}
    ours, theirs = names
    rows = [f"| clients | | {ours} | {theirs} | ratio |", "|---|---|---|---|---|"]
    for count in clients:
        for title, figure, digits in _FIGURES:
            values = [_by_round(found, name, closed_loop(count), figure) for name in names]
            ratios = [values[0][one] / values[1][one] for one in values[0] if values[1].get(one)]
            cells = [f"{statistics.median(one.values()):,.{digits}f}" if one else "–" for one in values]
            rows.append(f"| {count} | {title} | {cells[0]} | {cells[1]} | {_spread(ratios)} |")
    pss = _by_round(found, ours, MEMORY, PSS)
    if pss:
        most = max(pss.values())
        rows.append(
            f"\nPss of the weights' mappings: {most / 2**20:,.0f} MiB, {most / size:.2f} times the file."
        )
    return "\n".join(rows)


def _by_round(found: _Found, name: str, load: str, figure: str) -> dict[int, float]:
    """Return a figure of every round that has it."""
    return {
        number: value
        for (server, asked, number), figures in found.items()
        if (server, asked) == (name, load) and (value := figures.get(figure)) is not None
    }


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return "–"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
