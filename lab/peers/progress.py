"""Progress: a line a measurement with how far, what came out, and how much longer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from lab.peers.cells import PREFILL, QUEUED, STREAMS, TEXT, Cell

_SHOWN = {
    PREFILL: (("prefill_throughput", "prompt tok/s"),),
    STREAMS: (("median_itl_beside_ms", "ms ITL p50"), ("p99_itl_beside_ms", "ms p99")),
    QUEUED: (("median_itl_beside_ms", "ms ITL p50"), ("p99_itl_beside_ms", "ms p99")),
    TEXT: (("right_answers", "of 1 right"),),
}
_CLOSED = (("output_throughput", "tok/s"), ("median_ttft_ms", "ms TTFT"), ("median_itl_ms", "ms ITL"))


class Progress:
    """`total` measurements are to come; `tell` prints a line."""

    def __init__(self, total: int, tell: Callable[[str], None]) -> None:
        self._total, self.tell = total, tell
        self._done = 0
        self._began = time.monotonic()

    def measured(self, cell: Cell, figures: Mapping[str, float | None]) -> None:
        self._done += 1
        left = (time.monotonic() - self._began) / self._done * (self._total - self._done)
        head = f"[{self._done}/{self._total}, {left / 60:.0f} min left] round {cell.round + 1}"
        self.tell(f"{head} {cell.server} {cell.load}: {told(cell.load, figures)}")


def told(load: str, figures: Mapping[str, float | None]) -> str:
    """Return the figures that matter of one load, and every failure."""
    shown = [
        f"{figures[name]:.1f} {unit}"
        for name, unit in _SHOWN.get(load, _CLOSED)
        if figures.get(name) is not None
    ]
    failed = [f"{figures[name]:.0f} {name}" for name in ("failed", "inexact") if figures.get(name)]
    return ", ".join(shown + failed)
