"""`python -m lab.roofline`: from flags to tables, a file and a picture.

Runs gather in the output file: measure precisions and numbers of threads one by one, and the tables and the
plot show all that are in it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from diptych.bench.plot import can_plot
from diptych.engine.models.shape import UnsupportedModel
from diptych.runtime.settings import resolve_model
from lab.precisions import PRECISIONS, load_precision, matrix_bytes
from lab.roofline import record
from lab.roofline.ceilings import measure_ceilings
from lab.roofline.measure import Grid, measure
from lab.roofline.report import markdown


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, 1 when a precision cannot be computed, 2 for wrong flags."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.plot is not None and not can_plot():
        parser.error("--plot needs matplotlib: pip install matplotlib")
    try:
        path = resolve_model(options.model)
    except FileNotFoundError as error:
        parser.error(str(error))
    console = Console(stderr=True)
    grid = Grid(options.batches, options.contexts, options.prompts, int(options.kv_gib * 2**30))
    runs: list[dict[str, Any]] = []
    for dtype in options.dtype:
        for threads in options.threads:
            try:
                run = _run(path, dtype, threads, grid, console)
            except UnsupportedModel as error:
                console.print(f"{dtype}: {error}", style="red", markup=False)
                return 1
            runs.append(run)
            if options.output_file is not None:
                runs = record.gather(options.output_file, run)
    print(markdown(runs))
    if options.plot is not None:
        from lab.roofline.plot import save_plot

        save_plot(options.plot, runs, f"{path.name}: the engine alone, and its roofline (dashed)")
    return 0


def _run(path: Path, dtype: str, threads: int, grid: Grid, console: Console) -> dict[str, Any]:
    known = next(one for one in PRECISIONS if one == dtype)
    model = load_precision(path, known)
    ceilings = measure_ceilings(threads)
    total = len(grid.decodes(model)) + len(grid.prompts)
    points = []
    with Progress(console=console, disable=not console.is_terminal, refresh_per_second=2) as progress:
        task = progress.add_task(f"{dtype}, {threads} threads", total=total)
        for point in measure(model, grid, threads):
            points.append(point)
            progress.advance(task)
    ceilings = ceilings.or_better(measure_ceilings(threads))
    return record.as_object(model, dtype, matrix_bytes(path, known), ceilings, points)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m lab.roofline", description="Step times of the bare engine beside the roofline."
    )
    parser.add_argument("--model", default="bundled", help="GGUF file or Hugging Face folder")
    parser.add_argument(
        "--dtype", type=_precisions, default=["bf16"], help=f"by commas, of {', '.join(PRECISIONS)}"
    )
    parser.add_argument("--threads", type=_counts, default=[1, 2], help="by commas (default: 1,2)")
    parser.add_argument("--batches", type=_counts, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--contexts", type=_counts, default=[128, 512, 2000, 8000])
    parser.add_argument("--prompts", type=_counts, default=[128, 512, 2000, 8000], help="prefill lengths")
    parser.add_argument("--kv-gib", type=float, default=3.0, help="leave out points that need more (3)")
    parser.add_argument("--output-file", type=Path, help="JSON that gathers runs")
    parser.add_argument("--plot", type=Path, help="picture (PNG) of all runs of the file")
    return parser


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError("numbers must be at least 1")
    return counts


def _precisions(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PRECISIONS:
            raise argparse.ArgumentTypeError(f"no precision {name}; there are {', '.join(PRECISIONS)}")
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
