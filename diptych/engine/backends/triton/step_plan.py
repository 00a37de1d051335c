"""Plan a batch on the host as the arrays that its kernels read, and bring them to the device in two copies.

Sequences are ordered by memory, and within a memory decode rows come before chunks, so that every kernel
sees one contiguous range of rows. Logits come back in the order of the batch all the same.

Where layers with a window lie in blocks of their own (`KVLayout.windows`), such layers see the same rows with
blocks, tables and lengths of their own: a step as that of sequences which begin where the window does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from diptych.engine.backends.triton.packed_step import (
    NO_BLOCK,
    ChunkRows,
    DecodeRows,
    Group,
    PackedStep,
    PlacedStep,
    SeeingRows,
    TableRows,
)
from diptych.engine.backends.triton.recurrent.page_plan import plan_pages
from diptych.engine.batch import AXES, AbortWords, SequenceStep, visible_ends, window_cuts
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.models.shape import ModelShape
from diptych.engine.token_tree import depths

Ints = npt.NDArray[np.int64]
GATHERED_TOKENS = 65_536
"""Prefill attention gathers the contexts of chunks: at most of so many tokens at once, or of one sequence."""
MOST_TREE_TOKENS = 64
"""Tokens of the largest tree: each has a bit."""


def pack_step(
    sequences: Sequence[SequenceStep], abort: AbortWords | None, device: torch.device
) -> PlacedStep:
    """Plan a batch that `check_batch` accepted, and bring the plan to `device`."""
    ranks: dict[int, int] = {}
    for step in sequences:
        ranks.setdefault(id(step.memory), len(ranks))
    order = sorted(
        range(len(sequences)),
        key=lambda i: (
            ranks[id(sequences[i].memory)],
            len(sequences[i].token_ids) > 1,
            sequences[i].parents is not None,
        ),
    )
    spans, total = _spans(sequences, order)
    arrays = _Arrays()
    wide = arrays.add(*_token_columns(sequences, order, spans, total))
    logit_rows = [row for i, s in enumerate(sequences) for row in _last_rows(spans[i], s.logit_rows)]
    rows = arrays.add(np.array(logit_rows, dtype=np.int64))
    tables = [
        _plan_table(steps, order, spans, total, abort, arrays)
        for steps in (sequences, *window_cuts(sequences))
    ]
    slots = arrays.add(*_adapter_column(sequences, spans, total))
    pages = plan_pages(sequences, order, spans, abort, arrays.add)
    found = arrays.upload(device)
    tokens, positions, lanes = (found.wide[part] for part in wide)
    windows = sequences[0].memory.layout.windows
    return PlacedStep(
        PackedStep(
            tokens,
            positions.view(AXES, -1) if len(positions) > total else positions,
            lanes.int(),
            tuple(table.on(found, device) for table in tables),
            () if windows is None else windows.places,
            found.narrow[slots[0]] if slots else None,
            states=None if pages is None else pages.on(found.narrow),
        ),
        logit_rows=found.wide[rows[0]],
        logit_owners=tuple(i for i, s in enumerate(sequences) for _ in range(s.logit_rows)),
        spans=tuple(spans),
    )


def _seeing_rows(
    sequences: Sequence[SequenceStep], spans: Sequence[slice], device: torch.device
) -> Iterator[SeeingRows]:
    for step, rows in zip(sequences, spans, strict=True):
        if (ends := visible_ends(step)) is not None:
            table = torch.tensor(list(used_blocks(step)), device=device)
            yield SeeingRows(rows, step.memory.data, table, step.start, torch.from_numpy(ends).to(device))


def used_blocks(step: SequenceStep) -> Sequence[int]:
    """Return the blocks that a sequence's share of the step reads or writes."""
    return step.block_table[: step.memory.layout.blocks_for(step.start + len(step.token_ids))]


def _spans(sequences: Sequence[SequenceStep], order: Sequence[int]) -> tuple[list[slice], int]:
    """Rows of each sequence, which follow one another in `order`; and how many there are."""
    spans, begin = [slice(0, 0)] * len(sequences), 0
    for i in order:
        end = begin + len(sequences[i].token_ids)
        spans[i], begin = slice(begin, end), end
    return spans, begin


def _last_rows(span: slice, count: int) -> range:
    return range(span.stop - count, span.stop)


def _token_columns(
    sequences: Sequence[SequenceStep],
    order: Sequence[int],
    spans: Sequence[slice],
    total: int,
) -> tuple[Ints, Ints, Ints]:
    """Token, position and lane of each row."""
    tokens, lanes = (np.empty(total, dtype=np.int64) for _ in range(2))
    grids = any(step.grid is not None for step in sequences)
    positions = np.empty((AXES, total) if grids else total, dtype=np.int64)
    for i in order:
        step, span = sequences[i], spans[i]
        size = step.memory.layout.block_size
        at = np.arange(step.start, step.start + len(step.token_ids))
        tokens[span], lanes[span] = step.token_ids, at % size
        positions[..., span] = step.positions
    return tokens, positions, lanes


def written_blocks(step: SequenceStep, *, aborted: bool) -> Ints | int:
    """Return the block that each token of a sequence's share is written to; NO_BLOCK if it was aborted."""
    if aborted:
        return NO_BLOCK
    at = np.arange(step.start, step.start + len(step.token_ids))
    return np.asarray(used_blocks(step), dtype=np.int64)[at // step.memory.layout.block_size]


def _adapter_column(sequences: Sequence[SequenceStep], spans: Sequence[slice], total: int) -> list[Ints]:
    """Return the slot of each row, in a list; an empty one where no row has an adapter."""
    if all(step.adapter is None for step in sequences):
        return []
    slots = np.full(total, -1, dtype=np.int64)
    for step, span in zip(sequences, spans, strict=True):
        if step.adapter is not None:
            slots[span] = step.adapter
    return [slots]


@dataclass(frozen=True)
class _Found:
    """The arrays on the device."""

    wide: torch.Tensor
    """int64."""
    narrow: torch.Tensor
    """int32, the same numbers."""


class _Arrays:
    """Integer arrays that travel together: one copy for all."""

    def __init__(self) -> None:
        self._parts: list[Ints] = []
        self._length = 0

    def add(self, *arrays: Ints) -> tuple[slice, ...]:
        """Add arrays and return their places in the joined array."""
        slices = []
        for array in arrays:
            slices.append(slice(self._length, self._length + array.size))
            self._parts.append(array.reshape(-1))
            self._length += array.size
        return tuple(slices)

    def upload(self, device: torch.device) -> _Found:
        host = torch.from_numpy(np.concatenate(self._parts))
        if device.type == "cuda":
            host = host.pin_memory()  # else the copy would wait for all that was queued before it
        wide = host.to(device, non_blocking=True)
        return _Found(wide, wide.int())


@dataclass(frozen=True)
class _DecodePlan:
    """Decode rows whose arrays are not on the device yet."""

    rows: slice
    width: int
    places: tuple[slice, ...]
    """Places of tables and lengths in the joined array."""

    def on(self, found: _Found) -> DecodeRows:
        tables, lengths = (found.narrow[place] for place in self.places)
        return DecodeRows(self.rows, tables.view(-1, self.width), lengths)


@dataclass(frozen=True)
class _ChunkPlan:
    """Chunks whose arrays are not on the device yet."""

    rows: slice
    width: int
    places: tuple[slice, ...]
    """Places of tables, starts and offsets in the joined array."""
    max_tokens: int
    context_tokens: int
    tree: slice | None
    """Place of ancestors and depths, if the chunks are trees."""

    def on(self, found: _Found) -> ChunkRows:
        tables, starts, offsets = (found.narrow[place] for place in self.places)
        table = tables.view(-1, self.width)
        tree = None if self.tree is None else found.wide[self.tree].view(-1, 2)
        return ChunkRows(self.rows, table, starts, offsets, self.max_tokens, self.context_tokens, tree)


@dataclass(frozen=True)
class _GroupPlan:
    """A group whose arrays are not on the device yet: places in the joined array."""

    group: Group
    decodes: _DecodePlan | None
    chunks: tuple[_ChunkPlan, ...]

    def on(self, found: _Found) -> Group:
        decodes = None if self.decodes is None else self.decodes.on(found)
        return replace(self.group, decodes=decodes, chunks=tuple(plan.on(found) for plan in self.chunks))


@dataclass(frozen=True)
class _TablePlan:
    """A table whose arrays are not on the device yet."""

    sequences: Sequence[SequenceStep]
    spans: Sequence[slice]
    block_ids: slice
    """Place in the joined array."""
    groups: tuple[_GroupPlan, ...]

    def on(self, found: _Found, device: torch.device) -> TableRows:
        seeing = tuple(_seeing_rows(self.sequences, self.spans, device))
        return TableRows(found.wide[self.block_ids], tuple(group.on(found) for group in self.groups), seeing)


def _plan_table(
    sequences: Sequence[SequenceStep],
    order: Sequence[int],
    spans: Sequence[slice],
    total: int,
    abort: AbortWords | None,
    arrays: _Arrays,
) -> _TablePlan:
    """Plan the rows of sequences as the layers of one table see them; `order` goes memory by memory."""
    block_ids = np.empty(total, dtype=np.int64)
    for i, (step, span) in enumerate(zip(sequences, spans, strict=True)):
        block_ids[span] = written_blocks(step, aborted=abort is not None and abort.is_aborted(i))
    (column,) = arrays.add(block_ids)
    members: dict[int, list[int]] = {}
    for i in order:
        members.setdefault(id(sequences[i].memory), []).append(i)
    groups = (
        _plan_group(sequences[some[0]].memory, some, sequences, spans, arrays) for some in members.values()
    )
    return _TablePlan(sequences, spans, column, tuple(groups))


def _plan_group(
    memory: KVMemory,
    members: Sequence[int],
    sequences: Sequence[SequenceStep],
    spans: Sequence[slice],
    arrays: _Arrays,
) -> _GroupPlan:
    decodes = [i for i in members if len(sequences[i].token_ids) == 1]
    chunks = [i for i in members if len(sequences[i].token_ids) > 1]
    chains = [i for i in chunks if sequences[i].parents is None]
    trees = [i for i in chunks if sequences[i].parents is not None]

    def rows_of(some: Sequence[int]) -> slice:
        return slice(spans[some[0]].start, spans[some[-1]].stop)

    decode_plan = None
    if decodes:
        tables = _tables([sequences[i] for i in decodes])
        lengths = np.array([sequences[i].start + 1 for i in decodes], dtype=np.int64)
        decode_plan = _DecodePlan(rows_of(decodes), tables.shape[1], arrays.add(tables, lengths))
    plans = [
        _plan_chunks([sequences[i] for i in some], rows_of(some), arrays)
        for alike in (chains, trees)
        for some in _gathered_together(alike, sequences)
    ]
    return _GroupPlan(Group(memory.data, rows_of(members), None, ()), decode_plan, tuple(plans))


def _gathered_together(chunks: Sequence[int], sequences: Sequence[SequenceStep]) -> list[list[int]]:
    """`chunks` in their order, in runs of no more context than is gathered at once."""
    runs: list[list[int]] = []
    room = 0
    for i in chunks:
        context = sequences[i].start + len(sequences[i].token_ids)
        if not runs or context > room:
            runs.append([])
            room = GATHERED_TOKENS
        runs[-1].append(i)
        room -= context
    return runs


def _plan_chunks(steps: Sequence[SequenceStep], rows: slice, arrays: _Arrays) -> _ChunkPlan:
    tables = _tables(steps)
    counts = [len(step.token_ids) for step in steps]
    starts = np.array([step.start for step in steps], dtype=np.int64)
    offsets = np.cumsum([0, *counts], dtype=np.int64)
    context = int(starts.sum() + offsets[-1])
    places = arrays.add(tables, starts, offsets)
    trees = [ancestors(step.parents) for step in steps if step.parents is not None]
    tree = arrays.add(np.concatenate(trees))[0] if trees else None
    return _ChunkPlan(rows, tables.shape[1], places, max(counts), context, tree)


def ancestors(parents: Sequence[int]) -> Ints:
    """Return int64 `[tokens, 2]`: for each token of a tree a bit for each one that it sees, and its depth."""
    seen: list[int] = []
    for place, parent in enumerate(parents):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << place)
    bits = np.array(seen, dtype=np.uint64).view(np.int64)
    return np.stack([bits, np.array(depths(parents), dtype=np.int64)], axis=1)


def gathered_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """Return what a step with chunks takes beside its activations, at most, for contexts of a model in
    `dtype`.
    """
    tokens = max(GATHERED_TOKENS, shape.max_context)
    return 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize * tokens


def _tables(steps: Sequence[SequenceStep]) -> Ints:
    """Return the steps' block tables as rows, each padded with its own first block."""
    used = [used_blocks(step) for step in steps]
    tables = np.empty((len(used), max(map(len, used))), dtype=np.int64)
    for row, blocks in zip(tables, used, strict=True):
        row[: len(blocks)] = blocks
        row[len(blocks) :] = blocks[0]
    return tables
