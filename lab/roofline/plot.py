"""Speed against batch and length as a picture, the roofline dashed (needs matplotlib, which only this file
imports).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lab.roofline.report import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def save_plot(path: Path, runs: Sequence[Run], title: str) -> None:
    """Draw a row for each run: tokens/s of decode by batch and context, and of prefill by length."""
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    figure = Figure(figsize=(12, 3.6 * len(runs)), layout="constrained")
    figure.suptitle(title)
    for (decode, prefill), run in zip(figure.subplots(len(runs), 2, squeeze=False), runs, strict=True):
        name = f"{run['dtype']}, {run['threads']} thread{'s' if run['threads'] > 1 else ''}"
        _decode_panel(decode, run)
        decode.set_title(f"decode, {name}")
        _prefill_panel(prefill, run)
        prefill.set_title(f"prefill, {name}")
    figure.savefig(path, format="png", dpi=110)


def _decode_panel(panel: Axes, run: Run) -> None:
    points = [point for point in run["points"] if point["kind"] == "decode"]
    for context in sorted({point["tokens"] for point in points}):
        chosen = sorted((p for p in points if p["tokens"] == context), key=lambda p: p["batch"])
        batches = [point["batch"] for point in chosen]
        rates = [point["batch"] / point["seconds"] for point in chosen]
        roofs = [point["batch"] / point["roof_seconds"] for point in chosen]
        (line,) = panel.plot(batches, rates, marker="o", markersize=4, label=f"context {context:,}")
        panel.plot(batches, roofs, linestyle="--", color=line.get_color(), alpha=0.6)
    _axes(panel, "batch", sorted({point["batch"] for point in points}))


def _prefill_panel(panel: Axes, run: Run) -> None:
    points = sorted((p for p in run["points"] if p["kind"] == "prefill"), key=lambda p: p["tokens"])
    lengths = [point["tokens"] for point in points]
    (line,) = panel.plot(lengths, [p["tokens"] / p["seconds"] for p in points], marker="o", label="measured")
    roofs = [point["tokens"] / point["roof_seconds"] for point in points]
    panel.plot(lengths, roofs, linestyle="--", color=line.get_color(), alpha=0.6, label="roofline")
    _axes(panel, "tokens of the prompt", lengths)


def _axes(panel: Axes, label: str, ticks: Sequence[int]) -> None:
    panel.set_xlabel(label)
    panel.set_ylabel("tokens/s")
    if ticks:
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize="small")
