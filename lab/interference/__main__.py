"""`python -m lab.interference`: from flags to tables and a file.

Rounds gather in the output file: run once, or again later for more rounds; the tables show all that are in
it. Every round starts each system afresh, plays its scenes and stops it: about 90 s a round on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from diptych.bench.backends import Backend, Unreachable
from diptych.bench.backends.grpc import GrpcBackend
from diptych.bench.backends.request_parameters import Asking
from diptych.bench.measurement import Figures
from diptych.bench.request import RequestFailed
from lab.interference.neighbours import Ticks
from lab.interference.report import OTHERS, markdown
from lab.interference.scenes import Incomplete, Sizes, play
from lab.interference.systems import APART, LENDING, WIDE, systems
from lab.interference.targets import START, targets
from lab.peers.process import RunningServer, StartFailed
from lab.peers.servers import Server

_TIMEOUT_S = 120.0


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, 1 when a system fails or a target is missed, 2 for wrong flags."""
    options = _parser().parse_args(argv)
    console = Console(stderr=True)
    earlier = _read(options.output_file)
    kept = [one for one in earlier if one["dtype"] == options.dtype]
    for number in range(options.rounds):
        try:
            figures = _round(options, len(kept), console)
        except (Incomplete, RequestFailed, StartFailed, Unreachable) as error:
            console.print(f"lab.interference: {error}", style="red", markup=False)
            return 1
        kept.append(
            {
                "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
                "dtype": options.dtype,
                "load_average": os.getloadavg(),
                "systems": figures,
            }
        )
        if options.output_file is not None:
            others = [one for one in earlier if one["dtype"] != options.dtype]
            options.output_file.parent.mkdir(parents=True, exist_ok=True)
            options.output_file.write_text(json.dumps([*others, *kept], indent=1) + "\n")
        console.print(f"round {number + 1} of {options.rounds} done", style="dim")
    rounds = [one["systems"] for one in kept]
    print(markdown(rounds, f"{options.model} model, {options.dtype}, {_cores()} cores"))
    return 0 if all(one.met is not False for one in targets(rounds)) else 1


def _round(options: argparse.Namespace, number: int, console: Console) -> dict[str, Figures]:
    figures: dict[str, Figures] = {}
    sizes = Sizes(beside_s=options.window)
    known = systems(options.dtype, options.model, _cores())
    with tempfile.TemporaryDirectory(prefix="diptych-interference-") as folder:
        for name in options.systems:
            # Seeds of rounds lie far apart: no prompt comes twice, not even to a system that lived on.
            figures[name] = _played(known[name], name, Path(folder), 1000 * number, sizes)
            known_ms = {
                figure: round(value, 2) for figure, value in figures[name].items() if value is not None
            }
            console.print(f"{name}: {known_ms}", style="dim", soft_wrap=True)
    return figures


def _played(server: Server, name: str, folder: Path, seed: int, sizes: Sizes) -> Figures:
    @asynccontextmanager
    async def client(on_output: Callable[[float], None]) -> AsyncIterator[Backend]:
        backend = GrpcBackend(running.address, Asking(timeout_s=_TIMEOUT_S, on_output=on_output))
        try:
            yield backend
        finally:
            await backend.close()

    with RunningServer(server, folder) as running:
        before = Ticks.now()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            figures = runner.run(play(client, name, seed, sizes))
        others = Ticks.now().others_since(before, os.cpu_count() or 1)
        return {**figures, START: running.start_s, OTHERS: 100 * others}


def _read(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    rounds: list[dict[str, Any]] = json.loads(path.read_text())
    return rounds


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m lab.interference",
        description="Streams beside prompts, lent cores, a cached prefix and the time of a start.",
    )
    parser.add_argument("--model", default="bundled", help="GGUF file or Hugging Face folder")
    parser.add_argument("--dtype", default="auto", help="as `diptych up` takes it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=7.0, help="seconds of streams beside prompts (7)")
    parser.add_argument(
        "--systems", type=_names, default=[APART, LENDING, WIDE], help="by commas, of apart,lending,wide"
    )
    parser.add_argument("--output-file", type=Path, help="JSON that gathers rounds")
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in (APART, LENDING, WIDE):
            raise argparse.ArgumentTypeError(f"no system {name}; there are apart, lending and wide")
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
