"""Command `python -m lab.revisions`: unpack, build, start both, measure by turns, print the table."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import lab.revisions as package
from lab.closed_turn import Size, tell_round
from lab.peers.process import RunningServer, StartFailed
from lab.revisions.measure import by_turns
from lab.revisions.report import markdown
from lab.revisions.tree import NoSuchRevision, unpacked


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    size = Size(options.clients, options.per_client)
    try:
        trees = [unpacked(name) for name in (options.before, options.after)]
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diptych-revisions-")))
            systems = [
                stack.enter_context(RunningServer(tree.server(options.dtype), _made(folder / str(number))))
                for number, tree in enumerate(trees)
            ]
            for tree, system in zip(trees, systems, strict=True):
                tree.check_processes(system.pid)
            rounds = by_turns(systems, size, options.rounds, partial(tell_round, rounds=options.rounds))
    except (NoSuchRevision, StartFailed, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    load = f"{size.clients} clients, {size.input_len} in / {size.output_len} out"
    table = markdown(trees, rounds, f"`--dtype {options.dtype}`, {load}, {os.cpu_count()} cores")
    print(table)
    if options.output is not None:
        options.output.write_text(table + "\n")
    return 0


def _made(folder: Path) -> Path:
    """Make a folder for one system's logs and ready file: a revision may be measured beside itself."""
    folder.mkdir()
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lab.revisions",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", help="a commit, tag or branch")
    parser.add_argument("after", nargs="?", default="HEAD", help="another one (HEAD)")
    parser.add_argument("--clients", type=int, default=16, help="requests at a time (%(default)s)")
    parser.add_argument("--per-client", type=int, default=4, help="requests of each in a turn (%(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each revision (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="as of `diptych up` (%(default)s)")
    parser.add_argument("--output", type=Path, help="write the table to this file, too")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
