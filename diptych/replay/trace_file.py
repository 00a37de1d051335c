"""Recorded requests from a file, repeated and sped up as asked.

Three formats: Azure's CSV, Mooncake's JSON lines with ids of prefix blocks (both as
`diptych.bench.datasets.traces` reads them), and plain JSON lines of timestamp (ms), input_length and
output_length.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diptych.bench.datasets import BadDataset
from diptych.bench.datasets.traces import (
    MOONCAKE_BLOCK,
    TraceRow,
    read_azure_trace,
    read_json_lines,
    read_mooncake_trace,
)


@dataclass(frozen=True)
class Traffic:
    """Requests to replay: the rows of a trace, begun anew until there are `count` of them.

    A repetition has blocks of its own: what was cached in the first turn is no hit in the second.
    """

    rows: Sequence[TraceRow]
    count: int
    speed: float = 1.0
    """Factor on the arrival rate: 2 replays the trace in half of its time."""

    @property
    def rate(self) -> float:
        """Requests a second that are offered."""
        return self.speed * len(self.rows) / self._period

    def at_rate(self, rate: float) -> Traffic:
        """Return the same requests at so many a second."""
        return replace(self, speed=self.speed * rate / self.rate)

    @property
    def _period(self) -> float:
        """Seconds of one turn as recorded; the gap before the next one is a mean one."""
        span = self.rows[-1].arrival_s - self.rows[0].arrival_s
        return max(span, 1e-3) * len(self.rows) / max(len(self.rows) - 1, 1)

    def requests(self) -> Iterator[TraceRow]:
        """Yield the requests in order of time, the first one at 0 s."""
        first, period = self.rows[0].arrival_s, self._period
        stride = 1 + max((max(row.blocks, default=0) for row in self.rows), default=0)
        for index in range(self.count):
            turn, at = divmod(index, len(self.rows))
            row = self.rows[at]
            blocks = tuple(block + turn * stride for block in row.blocks) if turn else row.blocks
            yield TraceRow(
                (row.arrival_s - first + turn * period) / self.speed, row.input_len, row.output_len, blocks
            )

    def mean_lengths(self) -> tuple[float, float]:
        """Return the mean tokens of a prompt and of an answer."""
        number = len(self.rows)
        return sum(r.input_len for r in self.rows) / number, sum(r.output_len for r in self.rows) / number

    def shared_prefix(self) -> float:
        """Return the share of prompt tokens in whole blocks that an earlier request of the trace had."""
        seen: set[int] = set()
        shared = total = 0
        for row in self.rows:
            total += row.input_len
            whole = row.blocks[: row.input_len // MOONCAKE_BLOCK]
            for block in whole:
                if block not in seen:
                    break
                shared += MOONCAKE_BLOCK
            seen.update(whole)
        return shared / total


def read_trace(path: Path) -> tuple[TraceRow, ...]:
    """Read a trace of any of the formats, in order of time. Raises BadDataset, or OSError."""
    try:
        if path.suffix == ".csv":
            return read_azure_trace(path)
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            first = next((line for line in file if line.strip()), "")
        return read_mooncake_trace(path) if '"hash_ids"' in first else read_json_lines(path, _plain_row)
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadDataset(f"{path}: {error}") from None


def _plain_row(record: Any) -> TraceRow:
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    values = []
    for name in ("timestamp", "input_length", "output_length"):
        value = record.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
            raise ValueError(f"{name!r} must be a number from 0, not {value!r}")
        values.append(value)
    if values[1] < 1:
        raise ValueError("'input_length' must be at least 1")
    return TraceRow(values[0] / 1000, int(values[1]), int(values[2]))
