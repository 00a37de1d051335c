"""`python -m lab.beside_llama`: random models of two shapes on Diptych and llama.cpp's server, by turns.

    kquants   Llama-3.2-1B's shape as Q4_K_M lays it out
    experts   1 billion weights in bf16, of which a token meets a fifth

Each server has both cores to itself while it is measured, with the same prompts from the same load generator.
llama.cpp is that of `lab.peers`, with its best settings, and installed the same way. A journal keeps what is
measured: the same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from diptych.bench import values
from diptych.bench.backends import Unreachable
from diptych.bench.request import RequestFailed
from lab.beside_llama.memory import weights_pss
from lab.beside_llama.random_models import EXPERTS_1B, LLAMA_1B, Model, path_of, write
from lab.beside_llama.table import MEMORY, PSS, markdown
from lab.peers import environment, install, servers
from lab.peers.cells import Cell, Journal, Measurement, closed_loop
from lab.peers.install import InstallFailed
from lab.peers.measure import Sizes, measure_cell, warm_up
from lab.peers.places import DEFAULT_ROOT, Places
from lab.peers.process import RunningServer, StartFailed
from lab.peers.progress import told
from lab.peers.servers import Server

MODELS = {"kquants": (LLAMA_1B, "auto"), "experts": (EXPERTS_1B, "bf16")}
"""Models by name, each with our `--dtype`."""
SIZES = Sizes(per_client=1, fewest=4, warm_ups=2)
"""A prompt of these models takes a second on two cores."""
_START_S = 300.0
"""Seconds in which a server has read such a file, and Diptych packed it."""


def main(argv: Sequence[str]) -> int:
    """Measure what is missing and print the table. Exit status: 0, 1 where a server cannot be had."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.beside_llama", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--model", choices=MODELS, default="kquants")
    parser.add_argument("--rounds", type=values.count, default=3)
    parser.add_argument("--clients", type=values.count, nargs="+", default=[1, 16])
    parser.add_argument("--cache", type=Path, default=DEFAULT_ROOT, help="where llama.cpp is (%(default)s)")
    parser.add_argument("--only", choices=("diptych", "llama.cpp"), help="measure one of the two in this run")
    parser.add_argument("--fresh", action="store_true", help="forget an interrupted run")
    try:
        compare(parser.parse_args(argv))
    except (InstallFailed, StartFailed, RequestFailed, Unreachable) as error:
        print(f"lab.beside_llama: {error}", file=sys.stderr)
        return 1
    return 0


def compare(options: argparse.Namespace) -> None:
    """Raises InstallFailed, StartFailed, RequestFailed, Unreachable."""
    model, dtype = MODELS[options.model]
    places = Places(options.cache.expanduser().absolute())
    both = prepare(model, dtype, places, with_llama=options.only != "diptych")
    path = places.runs / f"{model.name}.jsonl"
    if options.fresh:
        path.unlink(missing_ok=True)
    versions = environment.versions()
    question = {"servers": [asdict(one) for one in both], "sizes": asdict(SIZES), "versions": versions}
    journal = Journal(path, question)
    for number in range(options.rounds):
        for server in both:
            if options.only in (None, server.family):
                cells = [Cell(number, server.name, closed_loop(count)) for count in options.clients]
                turn(server, cells, journal, places)
    size = path_of(model, places.models).stat().st_size
    print(markdown([server.name for server in both], options.clients, journal.measured, size))


def prepare(model: Model, dtype: str, places: Places, *, with_llama: bool) -> tuple[Server, Server]:
    """Make the model, and install llama.cpp if it is needed, where they are missing. Raises InstallFailed."""
    path = write(model, places.models)
    if with_llama:
        install.install_llama(places, tell)
    threads = len(environment.cores())
    ours, theirs = servers.diptych(dtype, str(path)), servers.llama_cpp(model.name, path, places, threads)
    return replace(ours, start_timeout_s=_START_S), replace(theirs, start_timeout_s=_START_S)


def turn(server: Server, cells: Sequence[Cell], journal: Journal, places: Places) -> None:
    """Start a server, and measure those of `cells` that are missing.

    Raises StartFailed, RequestFailed, Unreachable.
    """
    missing = journal.missing(cells)
    if not missing:
        return
    places.logs.mkdir(parents=True, exist_ok=True)
    with RunningServer(server, places.logs) as running:
        warm_up(running, SIZES)
        time.sleep(SIZES.rest_s)
        for cell in missing:
            measured = measure_cell(running, cell, SIZES)
            journal.add(measured)
            tell(f"round {cell.round + 1} {server.name} {cell.load}: {told(cell.load, measured.figures)}")
        if server.family == "diptych":
            figures = {PSS: float(weights_pss(running.pid))}
            journal.add(Measurement(Cell(missing[0].round, server.name, MEMORY), figures))


def tell(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
