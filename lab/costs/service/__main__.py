"""`python -m lab.costs.service`: start both, measure by turns, print and write the tables."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import lab.costs.service as package
from lab.closed_turn import Size, tell_round
from lab.costs.service.measure import bare_engine, by_turns
from lab.costs.service.report import markdown
from lab.peers.process import RunningServer, StartFailed
from lab.peers.servers import diptych
from lab.precisions import PRECISIONS


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    size = Size(options.clients, options.per_client, options.input_len, options.output_len)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="diptych-service-") as folder,
            bare_engine(options.model, options.dtype, size) as bare,
            RunningServer(diptych(options.dtype, options.model), Path(folder)) as system,
        ):
            rounds = by_turns(
                bare, system, size, options.rounds, lambda done: tell_round(done, options.rounds)
            )
    except (StartFailed, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    load = f"{size.clients} clients, {size.input_len} in / {size.output_len} out"
    table = markdown(rounds, f"`--dtype {options.dtype}`, {load}, {os.cpu_count()} cores")
    print(table)
    if options.output is not None:
        options.output.write_text(table + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lab.costs.service",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--clients", type=int, default=16, help="requests at a time (%(default)s)")
    add("--per-client", type=int, default=8, help="requests of each in a turn (%(default)s)")
    add("--input-len", type=int, default=128, help="tokens of a prompt (%(default)s)")
    add("--output-len", type=int, default=64, help="tokens of an answer (%(default)s)")
    add("--rounds", type=int, default=6, help="turns of each (%(default)s)")
    add("--dtype", choices=PRECISIONS, default="int8", help="(%(default)s)")
    add("--model", default="bundled", help="as of `diptych up` (%(default)s)")
    add("--output", type=Path, metavar="MD", help="write the tables to this file, too")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
