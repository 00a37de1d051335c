"""Medians and spreads of everything that was measured."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lab.peers.cells import Measurement

_SUMMED = frozenset(["failed", "inexact", "short_outputs"])  # a median would hide what happened in one round


@dataclass(frozen=True)
class Spread:
    """Spread of one figure over the rounds; of a count of faults, `median` is the sum."""

    median: float
    lowest: float
    highest: float


Key = tuple[str, str]
"""Server and load."""


@dataclass(frozen=True)
class Best:
    """A figure and the server that it belongs to."""

    server: str
    value: float


class Summary:
    """Figures by server and load."""

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        values: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for one in measurements:
            for name, value in one.figures.items():
                if value is not None:
                    values[one.cell.server, one.cell.load][name].append(value)
        self.figures: Mapping[Key, Mapping[str, Spread]] = {
            key: {name: _spread(name, seen) for name, seen in named.items()} for key, named in values.items()
        }

    def spread(self, server: str, load: str, figure: str) -> Spread | None:
        return self.figures.get((server, load), {}).get(figure)

    def median(self, server: str, load: str, figure: str) -> float | None:
        spread = self.spread(server, load, figure)
        return None if spread is None else spread.median

    def highest(self, servers: Iterable[str], load: str, figure: str) -> Best | None:
        return max(self._all(servers, load, figure), key=lambda one: one.value, default=None)

    def lowest(self, servers: Iterable[str], load: str, figure: str) -> Best | None:
        return min(self._all(servers, load, figure), key=lambda one: one.value, default=None)

    def _all(self, servers: Iterable[str], load: str, figure: str) -> list[Best]:
        medians = {server: self.median(server, load, figure) for server in servers}
        return [Best(server, value) for server, value in medians.items() if value is not None]


def _spread(name: str, values: list[float]) -> Spread:
    middle = sum(values) if name in _SUMMED else statistics.median(values)
    return Spread(middle, min(values), max(values))
