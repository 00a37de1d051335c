"""Cells of the comparison and their order, and the journal that lets an interrupted run go on.

A cell is one measurement of one server in one round. The order is A B C A B C: the machine's drift meets all
servers alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.peers.servers import Server
from lab.peers.shapes import Shape

TEXT, PREFILL, STREAMS, QUEUED = "text", "prefill", "streams", "queued"
START, PEAK = "start", "peak"  # noted beside what is asked for
MACHINE = "machine"  # stands for the server in measurements of PEAK


@dataclass(frozen=True)
class Cell:
    """`load` is one of the names above, what `closed_loop` gives, or that of a `Shape`."""

    round: int
    server: str
    load: str


@dataclass(frozen=True)
class Measurement:
    """A cell's figures by name; None where there was nothing to measure."""

    cell: Cell
    figures: Mapping[str, float | None]


def closed_loop(clients: int) -> str:
    return f"C={clients}"


def clients_of(load: str) -> int:
    """Invert `closed_loop`."""
    return int(load.removeprefix("C="))


def loads_of(server: Server, concurrencies: Sequence[int], shapes: Sequence[Shape] = ()) -> list[str]:
    """Return all loads of one round."""
    more = [STREAMS, QUEUED, *(shape.load for shape in shapes)]
    return [TEXT, *map(closed_loop, concurrencies), PREFILL, *(more if server.streams else [])]


def all_cells(
    servers: Sequence[Server], concurrencies: Sequence[int], rounds: int, shapes: Sequence[Shape] = ()
) -> list[Cell]:
    return [
        Cell(number, server.name, load)
        for number in range(rounds)
        for server in servers
        for load in loads_of(server, concurrencies, shapes)
    ]


class Journal:
    """Journal with one JSON line a measurement, written at once. The first line says what was asked for.

    A journal of another question (other servers, loads or prompts) is begun anew.
    """

    def __init__(self, path: Path, question: Mapping[str, Any]) -> None:
        self._path = path
        asked = json.dumps(question, sort_keys=True)
        lines = path.read_text().splitlines() if path.exists() else []
        kept = lines[1:] if lines and lines[0] == asked else []
        self.measured = [measurement for line in kept if (measurement := _read(line)) is not None]
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written anew: the next line must not continue one that was cut.
        path.write_text("\n".join([asked, *map(_line, self.measured)]) + "\n")

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """Return the cells without a measurement, in their order."""
        done = {one.cell for one in self.measured}
        return [cell for cell in cells if cell not in done]

    def add(self, measurement: Measurement) -> None:
        self.measured.append(measurement)
        with self._path.open("a") as file:
            file.write(_line(measurement) + "\n")


def _line(measurement: Measurement) -> str:
    return json.dumps(asdict(measurement))


def _read(line: str) -> Measurement | None:
    """None for a line that was cut when the program was killed."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return Measurement(Cell(**record["cell"]), record["figures"])
