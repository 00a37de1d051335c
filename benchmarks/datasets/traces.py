"""Recorded traffic: when requests came, how long they were, and which prefixes they had in common.

Two published formats are read. Microsoft's Azure LLM inference traces (2023, 2024) are CSV with a time and
two lengths. Mooncake's traces are JSON lines that also name, by `hash_ids`, each 512-token block of the
prompt: two requests that begin with the same ids began with the same tokens, so equal ids become equal
tokens here.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.datasets import BadDataset
from benchmarks.datasets.token_source import ANY_TOKENS, TokenSource
from benchmarks.request import BenchRequest

MOONCAKE_BLOCK = 512  # tokens that one hash id stands for
_ONCE = 1 << 32  # sets tokens of a prompt that shares nothing apart from those of a block


@dataclass(frozen=True)
class TraceRow:
    """One recorded request. `blocks` are the hash ids, none where the trace has no such thing."""

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
        return _cut(max(1, round(length * self.length)), self.max_input_len)

    def output_len(self, length: int) -> int:
        return _cut(max(1, round(length * self.length)), self.max_output_len)


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
        """Equal leading hash ids give equal leading tokens: every block is scaled to the same length."""
        block = max(1, round(MOONCAKE_BLOCK * self.scale.length))
        last = row.input_len - MOONCAKE_BLOCK * (len(row.blocks) - 1)
        lengths = [block] * (len(row.blocks) - 1) + [max(1, round(last * self.scale.length))]
        ids: list[int] = []
        for hash_id, length in zip(row.blocks, lengths, strict=True):
            # Drawn whole and cut, so that what is cut is a prefix of the whole block wherever it comes again.
            ids += self.tokens.draw(block, seed, hash_id)[:length]
            if self.scale.max_input_len is not None and len(ids) >= self.scale.max_input_len:
                break
        return tuple(ids[: self.scale.max_input_len])


def read_azure_trace(path: Path) -> tuple[TraceRow, ...]:
    """Columns TIMESTAMP, ContextTokens, GeneratedTokens. Raises BadDataset."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        missing = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(reader.fieldnames or ())
        if missing:
            raise BadDataset(f"{path}: no column {', '.join(sorted(missing))}")
        rows = []
        for number, record in enumerate(reader, start=2):
            try:
                rows.append((_azure_time(record["TIMESTAMP"]), _azure_lengths(record)))
            except (TypeError, ValueError) as error:
                raise BadDataset(f"{path}, line {number}: {error}") from None
    if not rows:
        raise BadDataset(f"{path}: no requests")
    start = rows[0][0]
    return _checked(path, (TraceRow((time - start).total_seconds(), *lengths) for time, lengths in rows))


def read_mooncake_trace(path: Path) -> tuple[TraceRow, ...]:
    """One object a line: timestamp (ms), input_length, output_length, hash_ids. Raises BadDataset."""
    rows = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                rows.append(_mooncake_row(json.loads(line)))
            except (KeyError, TypeError, ValueError) as error:
                raise BadDataset(f"{path}, line {number}: {type(error).__name__} {error}") from None
    if not rows:
        raise BadDataset(f"{path}: no requests")
    return _checked(path, iter(rows))


def _azure_time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)  # the trace of 2023 names no zone, 2024's does


def _azure_lengths(record: dict[str, str]) -> tuple[int, int]:
    return int(record["ContextTokens"]), int(record["GeneratedTokens"])


def _mooncake_row(record: dict[str, Any]) -> TraceRow:
    length, blocks = int(record["input_length"]), tuple(int(one) for one in record["hash_ids"])
    if len(blocks) != -(-length // MOONCAKE_BLOCK):
        raise ValueError(f"{len(blocks)} hash ids for {length} tokens, blocks have {MOONCAKE_BLOCK}")
    return TraceRow(record["timestamp"] / 1000, length, int(record["output_length"]), blocks)


def _checked(path: Path, rows: Iterator[TraceRow]) -> tuple[TraceRow, ...]:
    """In order of time, every length positive. Raises BadDataset."""
    ordered = sorted(rows, key=lambda row: row.arrival_s)
    for row in ordered:
        if row.input_len < 1 or row.output_len < 0 or any(block < 0 for block in row.blocks):
            raise BadDataset(f"{path}: impossible lengths in {row}")
    return tuple(ordered)


def _cut(length: int, limit: int | None) -> int:
    return length if limit is None else min(length, limit)
