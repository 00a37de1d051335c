"""Outputs of a run: tables on the terminal, a file, a picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from diptych.bench import plot, report, result_file
from diptych.bench.campaign import LoadResult
from diptych.bench.result_file import RunDescription

_WIDTH = 1000  # columns: more than any table has, for a terminal had better break a line than we a figure


class BadPath(Exception):
    """A result could not be written there."""


def check(options: argparse.Namespace) -> None:
    """Make the folders of what is to be written, before anything is measured. Raises BadPath."""
    for flag, path in (("--output-file", options.output_file), ("--plot", options.plot)):
        if path is not None:
            try:
                _check(path)
            except OSError as error:
                raise BadPath(f"{flag} {path}: {error.strerror}") from None


def tell(options: argparse.Namespace, results: Sequence[LoadResult], described: RunDescription) -> bool:
    """Show and write all that was asked for. Returns whether all of it could be written."""

    def save_results(path: Path) -> None:
        objects = result_file.as_objects(results, described, detailed=options.save_detailed)
        result_file.write(path, objects)

    def save_plot(path: Path) -> None:
        name = options.label or described.backend
        plot.save_plot(path, results, f"{name}: {described.model_id}, {described.dataset_name}")

    # Before the tables: who reads them may leave before their end, as `head` does, which ends the process.
    written = [
        _written("--output-file", options.output_file, save_results),
        _written("--plot", options.plot, save_plot),
    ]
    _show(results, described.dataset_name)
    return all(written)


def _show(results: Sequence[LoadResult], dataset: str) -> None:
    console, errors = Console(width=_WIDTH), Console(stderr=True)
    for table in report.tables(results):
        console.print(table)
    ordered = plot.in_order(results)
    at = plot.knee_of(ordered)
    if at is not None:
        console.print(f"knee (most throughput for its latency): {ordered[at].load.label}")
    for warning in report.warnings(results, dataset):
        errors.print(warning, style="yellow", markup=False, highlight=False, soft_wrap=True)


def _check(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not (path.is_file() or path.is_dir()):
        return  # a pipe or a device: to open it is to use it
    new = not path.exists()
    with path.open("ab"):  # what a file holds stays until there is something to replace it
        pass
    if new:
        path.unlink()


def _written(flag: str, path: Path | None, save: Callable[[Path], None]) -> bool:
    if path is not None:
        try:
            save(path)
        except OSError as error:
            print(f"diptych bench: {flag} {path}: {error.strerror}", file=sys.stderr)
            return False
    return True
