"""Recorded traffic: when requests came, how long they were, and which prefixes they had in common.

Two published formats are read. Microsoft's Azure LLM inference traces (2023, 2024) are CSV with a time and
two lengths. Mooncake's traces are JSON lines that also name, by `hash_ids`, each 512-token block of the
prompt: two requests that begin with the same ids began with the same tokens, so equal ids become equal
tokens here.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diptych.bench.datasets import BadDataset
from diptych.bench.datasets.fields import whole
from diptych.bench.datasets.token_source import ANY_TOKENS, TokenSource
from diptych.bench.request import BenchRequest

MOONCAKE_BLOCK = 512  # tokens that one hash id stands for
_ONCE = 1 << 32  # sets tokens of a prompt that shares nothing apart from those of a block


@dataclass(frozen=True)
class TraceRow:
    """Recorded request. `blocks` are the hash ids, none where the trace has no such thing."""

    arrival_s: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class TraceScale:
    """Factors on a trace: times are multiplied by `time` (0.1 is ten times the load), lengths by `length`.

    Afterwards prompts are cut to `max_input_len` and answers to `max_output_len`, where these are given.
    """

    time: float = 1.0
    length: float = 1.0
    max_input_len: int | None = None
    max_output_len: int | None = None

    def input_len(self, length: int) -> int:
        return _cut(self.whole_len(length), self.max_input_len)

    def output_len(self, length: int) -> int:
        return _cut(self.whole_len(length), self.max_output_len)

    def whole_len(self, length: int) -> int:
        """Return a length that is scaled and not cut."""
        return max(1, round(length * self.length))


AS_RECORDED = TraceScale()


@dataclass(frozen=True)
class Trace:
    """A trace as a dataset: the first `count` of its rows, at their scaled times."""

    rows: tuple[TraceRow, ...]
    scale: TraceScale = AS_RECORDED
    tokens: TokenSource = ANY_TOKENS
    name: str = "trace"

    @property
    def size(self) -> int | None:
        return len(self.rows)

    def requests(self, count: int, seed: int) -> list[BenchRequest]:
        return [self._request(index, seed) for index in range(count)]

    def _request(self, index: int, seed: int) -> BenchRequest:
        turns, at = divmod(index, len(self.rows))
        row = self.rows[at]
        period = self.rows[-1].arrival_s - self.rows[0].arrival_s
        arrival = (row.arrival_s - self.rows[0].arrival_s + turns * period) * self.scale.time
        prompt = self._shared_prompt(row, seed) if row.blocks else self._own_prompt(row, index, seed)
        return BenchRequest(prompt, self.scale.output_len(row.output_len), arrival)

    def _own_prompt(self, row: TraceRow, index: int, seed: int) -> tuple[int, ...]:
        return self.tokens.draw(self.scale.input_len(row.input_len), seed, _ONCE, index)

    def _shared_prompt(self, row: TraceRow, seed: int) -> tuple[int, ...]:
        """Equal leading hash ids give equal leading tokens: where a block begins and ends, its place says."""
        length = self.scale.input_len(row.input_len)
        ids: list[int] = []
        for place, hash_id in enumerate(row.blocks):
            ids += self.tokens.draw(self._edge(place + 1) - self._edge(place), seed, hash_id)
            if len(ids) >= length:
                break
        return tuple(ids[:length])

    def _edge(self, blocks: int) -> int:
        """Scaled length of so many blocks: some are a token longer than others, so that the sum is right."""
        return self.scale.whole_len(MOONCAKE_BLOCK * blocks) if blocks else 0


def read_azure_trace(path: Path) -> tuple[TraceRow, ...]:
    """Read a trace with columns TIMESTAMP, ContextTokens, GeneratedTokens. Raises BadDataset."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        missing = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(reader.fieldnames or ())
        if missing:
            raise BadDataset(f"{path}: no column {', '.join(sorted(missing))}")
        times, rows = [], []
        for record in reader:
            try:
                times.append(_azure_time(record["TIMESTAMP"]))
                rows.append(_azure_row((times[-1] - times[0]).total_seconds(), record))
            except ValueError as error:
                raise BadDataset(f"{path}, line {reader.line_num}: {error}") from None
    return _in_order(path, rows)


def read_mooncake_trace(path: Path) -> tuple[TraceRow, ...]:
    """Read a trace with an object a line: timestamp (ms), input_length, output_length, hash_ids.

    Raises BadDataset.
    """
    return read_json_lines(path, _mooncake_row)


def read_json_lines(path: Path, parse: Callable[[Any], TraceRow]) -> tuple[TraceRow, ...]:
    """Read a trace with a JSON value a line, of which `parse` makes a row or raises ValueError.

    Raises BadDataset.
    """
    rows = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                rows.append(parse(json.loads(line)))
            except ValueError as error:
                raise BadDataset(f"{path}, line {number}: {error}") from None
    return _in_order(path, rows)


def _azure_time(text: str | None) -> datetime:
    try:
        time = datetime.fromisoformat(text or "")
    except ValueError as error:
        raise ValueError(f"'TIMESTAMP': {error}") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)  # the trace of 2023 names no zone, 2024's does


def _azure_row(arrival_s: float, record: dict[str, str]) -> TraceRow:
    asked, told = (whole(record[name], name) for name in ("ContextTokens", "GeneratedTokens"))
    return _possible(TraceRow(arrival_s, asked, told))


def _mooncake_row(record: Any) -> TraceRow:
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    missing = {"timestamp", "input_length", "output_length", "hash_ids"} - set(record)
    if missing:
        raise ValueError(f"no {', '.join(sorted(missing))}")
    time, length, ids = record["timestamp"], whole(record["input_length"], "input_length"), record["hash_ids"]
    if not (isinstance(time, int | float) and math.isfinite(time)):
        raise ValueError(f"'timestamp' must be a number of milliseconds, not {time!r}")
    if not isinstance(ids, list):
        raise ValueError(f"'hash_ids' must be a list, not {ids!r}")
    blocks = tuple(whole(one, "hash_ids") for one in ids)
    if len(blocks) != -(-length // MOONCAKE_BLOCK):
        raise ValueError(f"{len(blocks)} hash ids for {length} tokens, blocks have {MOONCAKE_BLOCK}")
    return _possible(TraceRow(time / 1000, length, whole(record["output_length"], "output_length"), blocks))


def _possible(row: TraceRow) -> TraceRow:
    """Return a row whose values are possible. Raises ValueError."""
    if row.input_len < 1 or row.output_len < 0 or any(block < 0 for block in row.blocks):
        raise ValueError(f"impossible lengths in {row}")
    return row


def _in_order(path: Path, rows: Sequence[TraceRow]) -> tuple[TraceRow, ...]:
    """Return the rows in order of time. Raises BadDataset."""
    if not rows:
        raise BadDataset(f"{path}: no requests")
    return tuple(sorted(rows, key=lambda row: row.arrival_s))


def _cut(length: int, limit: int | None) -> int:
    return length if limit is None else min(length, limit)
