"""Latency against load as a picture (needs matplotlib, which only this file imports)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from diptych.bench.campaign import LoadResult
from diptych.bench.figures import find_knee
from diptych.bench.load import INFINITE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS = (
    ("TTFT, ms", (("median_ttft_ms", "p50"), ("p90_ttft_ms", "p90"), ("p99_ttft_ms", "p99"))),
    ("ITL, ms", (("median_itl_ms", "p50"), ("p90_itl_ms", "p90"), ("p99_itl_ms", "p99"))),
    ("tokens/s", (("output_throughput", "output"),)),
)


def can_plot() -> bool:
    return find_spec("matplotlib") is not None


def save_plot(path: Path, results: Sequence[LoadResult], title: str) -> None:
    """Draw medians as lines, the rounds' spread as bands, the knee as a dotted line.

    Needs one result at least.
    """
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    ordered = in_order(results)
    places = _places(ordered)
    in_flight = _all_closed(ordered)
    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle(title, parse_math=False)  # a label may have dollars
    for panel, (label, lines) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for name, legend in lines:
            _draw(panel, ordered, places, name, legend)
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        panel.set_xlabel("requests in flight" if in_flight else "requests/s offered")
        if in_flight:
            panel.set_xscale("log", base=2)
            panel.set_xticks(places, [f"{one:g}" for one in places])
        at = knee_of(ordered)
        if at is not None:
            panel.axvline(places[at], linestyle=":", color="gray", label="knee")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=130)


def in_order(results: Sequence[LoadResult]) -> list[LoadResult]:
    """Return the results by load, the smallest first."""
    return [one for _, one in sorted(zip(_places(results), results, strict=True), key=lambda pair: pair[0])]


def knee_of(ordered: Sequence[LoadResult]) -> int | None:
    """Return the position of the knee among results in order of load; None where loads differ in more than
    one way.
    """
    loads = [one.load for one in ordered]
    if len({one.request_rate for one in loads}) > 1 and len({one.max_concurrency for one in loads}) > 1:
        return None
    figures = [one.figures() for one in ordered]
    points = [(one["output_throughput"] or 0.0, one["median_e2el_ms"] or 0.0) for one in figures]
    return find_knee(points)


def _all_closed(results: Sequence[LoadResult]) -> bool:
    """Return whether results differ in their clients; else in their rates, even with a closed loop among
    them.
    """
    return all(one.load.closed for one in results)


def _places(results: Sequence[LoadResult]) -> list[float]:
    """Return the place of each load on the axis that all of them share."""
    if _all_closed(results):
        return [float(one.load.max_concurrency or 0) for one in results]
    return [_rate(one) for one in results]


def _rate(result: LoadResult) -> float:
    """Return requests a second; of a load that names no number of them, a trace or all at once, what came of
    it.
    """
    asked = result.load.request_rate
    return asked if asked not in (None, INFINITE) else result.figures()["request_throughput"] or 0.0


def _draw(
    panel: Axes, ordered: Sequence[LoadResult], places: Sequence[float], name: str, legend: str
) -> None:
    pairs = zip(places, ordered, strict=True)
    known = [(place, one) for place, one in pairs if one.figures().get(name) is not None]
    loads = [place for place, _ in known]
    panel.plot(
        loads, [one.figures()[name] or 0.0 for _, one in known], marker="o", markersize=4, label=legend
    )
    low, high = zip(*(one.spread()[name] for _, one in known), strict=True) if known else ((), ())
    panel.fill_between(loads, low, high, alpha=0.15)
