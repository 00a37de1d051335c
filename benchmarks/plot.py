"""Latency against load as a picture (needs matplotlib, which only this file imports)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.campaign import LoadResult
from benchmarks.knee import knee
from benchmarks.load import INFINITE

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
    """Medians as lines, the rounds' spread as bands, the knee as a dotted line. Needs one result at least."""
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    axis = results[0].load.axis
    ordered = sorted(results, key=load_size)
    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle(title)
    for panel, (label, lines) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for name, legend in lines:
            _draw(panel, ordered, name, legend)
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        panel.set_xlabel("requests in flight" if axis == "max_concurrency" else "requests/s offered")
        if axis == "max_concurrency":
            panel.set_xscale("log", base=2)
            panel.set_xticks([load_size(one) for one in ordered], [f"{load_size(one):g}" for one in ordered])
        _mark_knee(panel, ordered)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=130)


def find_knee(ordered: Sequence[LoadResult]) -> int | None:
    """Position of the knee among results in order of load."""
    figures = [one.figures() for one in ordered]
    points = [(one["output_throughput"] or 0.0, one["median_e2el_ms"] or 0.0) for one in figures]
    return knee(points)


def load_size(result: LoadResult) -> float:
    """Where a load stands on the axis; a replayed trace stands where its rate was."""
    load = result.load
    if load.closed:
        return float(load.max_concurrency or 0)
    if load.request_rate is None or load.request_rate == INFINITE:
        return result.figures()["request_throughput"] or 0.0
    return load.request_rate


def _draw(panel: Axes, ordered: Sequence[LoadResult], name: str, legend: str) -> None:
    known = [one for one in ordered if one.figures().get(name) is not None]
    loads = [load_size(one) for one in known]
    panel.plot(loads, [one.figures()[name] or 0.0 for one in known], marker="o", markersize=4, label=legend)
    low, high = zip(*(one.spread()[name] for one in known), strict=True) if known else ((), ())
    panel.fill_between(loads, low, high, alpha=0.15)


def _mark_knee(panel: Axes, ordered: Sequence[LoadResult]) -> None:
    at = find_knee(ordered)
    if at is not None:
        panel.axvline(load_size(ordered[at]), linestyle=":", color="gray", label="knee")
