"""Static buffers of a captured decode step, and the host's copies of them.

Field by field for `max_batch` rows, so that a step of fewer rows is the first rows of everything. Rows that
no sequence has are padding: they write nowhere (NO_BLOCK), attend to nothing, and their tokens are not read.
The host has two copies of everything, taken in turns: while a step is laid out, the copy of the one before
may still be on its way to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from diptych.engine.backends.triton.packed_step import NO_BLOCK
from diptych.engine.backends.triton.step_plan import used_blocks
from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.sampling import SampleRow

TURNS = 2
"""Copies that the host has."""

_Kinds = dict[str, tuple[npt.DTypeLike, float]]
_FIELDS: _Kinds = {
    # Name: its type, and what padding has. The eight-byte ones first, so that all are aligned.
    "tokens": (np.int64, 0),
    "sources": (np.int64, 0),
    "positions": (np.int64, 0),
    "block_ids": (np.int64, NO_BLOCK),
    "seeds": (np.int64, 0),
    "counters": (np.int64, 0),
    "top_p": (np.float64, 1.0),
    "lanes": (np.int32, 0),
    "lengths": (np.int32, 0),
    "adapters": (np.int32, -1),
    "top_k": (np.int32, 0),
    "temperature": (np.float32, 0.0),
    "min_p": (np.float32, 0.0),
}
FIELD_TYPES = {name: torch.from_numpy(np.empty(0, kind)).dtype for name, (kind, _) in _FIELDS.items()}
"""Type of each field on the device."""
BLOCKS = "block_ids"
"""Field with the block of each row's token, which each table of layers has (`of_table`)."""
WINDOW_LENGTHS = "window_lengths"
"""Field like `lengths`, of windowed tables, where there are any."""


def of_table(name: str, table: int) -> str:
    """Return the field that is `name` for the layers of a table; 0 is that of all tokens."""
    return f"{name}_{table}" if table else name


def _fields(tables: int) -> _Kinds:
    """Return the fields of a step whose rows have so many tables, the eight-byte ones first."""
    if tables == 1:
        return _FIELDS
    wide = {name: kind for name, kind in _FIELDS.items() if np.dtype(kind[0]).itemsize == 8}
    blocks: _Kinds = {of_table(BLOCKS, table): (np.int64, NO_BLOCK) for table in range(1, tables)}
    return wide | blocks | _FIELDS | {WINDOW_LENGTHS: (np.int32, 0)}


Fields = dict[str, npt.NDArray[Any]]


class RowFields:
    """Fields of each row, on the host and on the device: one copy brings all.

    `sampled`, int64 `[rows]` on the device, is where a step leaves its tokens. It lies before the field
    `tokens`, so that `known`, int64 `[2 * rows]`, is both, and `sources` says where in it a row's token is.
    """

    def __init__(self, rows: int, device: torch.device, tables: int = 1) -> None:
        """Allocate fields of `rows` rows that have so many tables each."""
        self._kinds, self._blocks = _fields(tables), [of_table(BLOCKS, table) for table in range(tables)]
        sizes = [np.dtype(kind).itemsize * rows for kind, _ in self._kinds.values()]
        pinned = device.type == "cuda"
        self._rows = rows
        self._host_bytes = [
            torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=pinned) for _ in range(TURNS)
        ]
        kept = torch.zeros(8 * rows + sum(sizes), dtype=torch.uint8, device=device)
        self.known = kept[: 16 * rows].view(torch.int64)
        self.sampled = self.known[:rows]
        self._device_bytes = kept[8 * rows :]
        self._host: list[Fields] = [{} for _ in range(TURNS)]
        self._device: dict[str, torch.Tensor] = {}
        begin = 0
        for (name, (kind, padding)), size in zip(self._kinds.items(), sizes, strict=True):
            for copy, fields in zip(self._host_bytes, self._host, strict=True):
                fields[name] = copy[begin : begin + size].numpy().view(kind)
                fields[name][:] = padding
            self._device[name] = self._device_bytes[begin : begin + size].view(
                torch.from_numpy(np.empty(0, kind)).dtype
            )
            begin += size
        self.upload(0)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a field on the device, `[rows]`."""
        return self._device[name]

    def fill(
        self,
        turn: int,
        sequences: Sequence[SequenceStep],
        sample_rows: Sequence[SampleRow | None],
        cuts: Sequence[Sequence[SequenceStep]] = (),
    ) -> None:
        """Lay a decode step into one of the host's copies, one row a sequence; the rest becomes padding.

        `cuts` are the step as the layers of each windowed table see it (`window_cuts`).
        """
        host, count = self._host[turn], len(sequences)
        starts = np.array([step.start for step in sequences], dtype=np.int64)
        size = sequences[0].memory.layout.block_size
        host["tokens"][:count] = [step.token_ids[0] for step in sequences]
        host["sources"][:count] = [
            self._rows + row if step.follows is None else step.follows for row, step in enumerate(sequences)
        ]
        host["positions"][:count] = starts + [step.shift for step in sequences]
        for name, seen in zip(self._blocks, (sequences, *cuts), strict=True):
            host[name][:count] = [step.block_table[step.start // size] for step in seen]
        if cuts:
            host[WINDOW_LENGTHS][:count] = [step.start + 1 for step in cuts[0]]
        host["lanes"][:count] = starts % size
        host["lengths"][:count] = starts + 1
        host["adapters"][:count] = [-1 if step.adapter is None else step.adapter for step in sequences]
        for row, (step, draw) in enumerate(zip(sequences, sample_rows, strict=True)):
            _fill_sampling(host, row, draw, unknown=int(step.follows is not None))
        for name, (_, padding) in self._kinds.items():
            host[name][count:] = padding

    def clear(self, turn: int) -> None:
        """Make padding of all rows, on the host's copy and on the device."""
        for name, (_, padding) in self._kinds.items():
            self._host[turn][name][:] = padding
        self.upload(turn)

    def abort_rows(self, turn: int, abort: AbortWords | None, count: int) -> None:
        """Make rows that were aborted write nowhere."""
        if abort is None:
            return
        for name in self._blocks:
            self._host[turn][name][:count][abort.words[:count] != 0] = NO_BLOCK

    def upload(self, turn: int) -> None:
        """Bring a copy of the host to the device, in the order of the current stream."""
        self._device_bytes.copy_(self._host_bytes[turn], non_blocking=True)


def _fill_sampling(host: Fields, row: int, draw: SampleRow | None, unknown: int) -> None:
    """Lay out a row's sampling parameters; `unknown` tokens of its output are not on the host yet."""
    if draw is None:
        for name in ("seeds", "counters", "top_k", "temperature", "top_p", "min_p"):
            host[name][row] = _FIELDS[name][1]
        return
    for name, value in sampling_values(draw).items():
        host[name][row] = value
    host["counters"][row] += unknown


class BlockTables:
    """The block tables of a step's rows, `[rows, width]` int32, rewritten only where they changed."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = [torch.zeros((rows, width), dtype=torch.int32, pin_memory=pinned) for _ in range(TURNS)]
        self._plain: list[npt.NDArray[np.int32]] = [copy.numpy() for copy in self._host]
        self._known: list[list[list[int]]] = [[[] for _ in range(rows)] for _ in range(TURNS)]
        self.device = torch.zeros((rows, width), dtype=torch.int32, device=device)

    def fill(self, turn: int, sequences: Sequence[SequenceStep]) -> None:
        """Lay the sequences' tables into one of the host's copies.

        A table mostly has what it had at the turn before, or one block more: comparing lists of known
        numbers is many times as fast as turning them into arrays.
        """
        plain, kept = self._plain[turn], self._known[turn]
        for row, step in enumerate(sequences):
            used, known = list(used_blocks(step)), kept[row]
            if used == known:
                continue
            begin = len(known) if used[: len(known)] == known else 0
            plain[row, begin : len(used)] = used[begin:]
            kept[row] = used

    def upload(self, turn: int, rows: int) -> None:
        """Bring the first `rows` tables to the device, in the order of the current stream."""
        self.device[:rows].copy_(self._host[turn][:rows], non_blocking=True)


def sampling_values(draw: SampleRow) -> dict[str, float]:
    """Return the parameters by which one row is sampled, as kernels/gpu/sample.py takes them."""
    params = draw.params
    return {
        # The kernel takes the bits of an unsigned seed as a signed number.
        "seeds": _signed(params.seed),
        "counters": len(draw.output_ids),
        "top_k": params.top_k,
        "temperature": 0.0 if params.greedy else params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
    }


def _signed(seed: int) -> int:
    bits = seed & 0xFFFFFFFFFFFFFFFF
    return bits - (1 << 64) if bits >> 63 else bits
