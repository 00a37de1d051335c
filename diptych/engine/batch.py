"""The batch of one engine step, decode rows and prefill chunks freely mixed, and the step's output.

Computed tokens catch up with existing ones: a decode row is a chunk of one token, a prefill chunk one of
many. Nothing else tells them apart.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.sampling import Sampled, SampleFailure, SampleRow
from diptych.engine.token_tree import depths

AXES = 3
"""Positions of a token that is a row of an image's grid: time, height, width."""


@dataclass(frozen=True, eq=False)
class EmbeddingRows:
    """Embeddings of a chunk's tokens from number `at` on, in place of those of their ids."""

    at: int
    rows: torch.Tensor
    """`[tokens, hidden]`, of any floating type, on any device; `[tokens, (1 + n) * hidden]` where as many
    rows follow each, of which the residual takes one after each of the first n layers (Qwen3-VL).
    """
    whole: bool = False
    """The tokens see one another, also those behind them: all that is left of an image (Gemma 3)."""


@dataclass(frozen=True)
class SequenceStep:
    """A sequence's share of a step: compute `token_ids` at positions `start, start + 1, ...`.

    Position p lives in `memory` at block `block_table[p // block_size]`, lane `p % block_size`. Keys and
    values of positions below `start` must be there already; those of this step are written by the step.
    Sequences of one batch may lie in different memories (the pools of several decode workers).
    """

    memory: KVMemory
    block_table: Sequence[int]
    start: int
    token_ids: Sequence[int]
    wants_logits: bool
    """True if the step returns logits after the last of `token_ids`."""
    trailing: int = 1
    """Number of the last tokens of `token_ids` after which logits are wanted."""
    follows: int | None = None
    """Row of the step launched before, for one that is launched ahead (`Runner.launch`): the row's sampled
    token is this step's one token. What stands in `token_ids` is not looked at then.
    """
    adapter: int | None = None
    """Slot of the adapter of all tokens (`Runner.place_adapter`); None: the base model."""
    embeddings: Sequence[EmbeddingRows] = ()
    """Embeddings of tokens that stand for an image; they do not overlap."""
    shift: int = 0
    """Rotary positions of the tokens less their places `start`, `start + 1`, ...: 0 or less."""
    grid: npt.NDArray[np.int64] | None = None
    """Rotary positions `[3, tokens]` by time, height and width, where they are no places shifted alike."""
    window_tables: Sequence[Sequence[int]] = ()
    """Blocks of the layers with a window, where these lie in blocks of their own (`KVLayout.windows`): for
    each table one a place, from `window_first` on. `block_table` is that of the other layers then.

    Of a model with recurrent layers (`KVLayout.states`) they are the pages: that of the token before `start`
    is read, those of the step's own places are written once all layers are computed. Where two places have
    one page, it is left with the later one's states.
    """
    window_first: int = 0
    """Place of the first of them: no token of this step reads what lies before."""
    parents: Sequence[int] | None = None
    """Places in `token_ids` of the ones that these follow in a tree; -1: the last one before the step.

    A parent comes before its children. Each token sees its ancestors alone, its position is `start` and their
    number, and its keys and values lie in lane `start` and its place. None: each follows the one before it.
    """
    settled: int | None = None
    """Tokens of `token_ids`, the first ones, that are no guesses; None: all. Recurrent states are kept behind
    these only, and read by the others. Where it is given they are added to states one by one, as in steps of
    their own.
    """

    @property
    def kept_tokens(self) -> int:
        """Tokens of the step, the first ones, behind which recurrent states are kept."""
        return len(self.token_ids) if self.settled is None else self.settled

    @property
    def logit_rows(self) -> int:
        """Rows of logits that this sequence has in the step's result."""
        return self.trailing if self.wants_logits else 0

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Rotary positions of the tokens, `[tokens]`, or `[3, tokens]` of a `grid`."""
        if self.grid is not None:
            return self.grid
        first = self.start + self.shift
        if self.parents is None:
            return np.arange(first, first + len(self.token_ids))
        return np.array(depths(self.parents), dtype=np.int64) + first


def cut_to_window(step: SequenceStep, table: int) -> SequenceStep:
    """Return a step as the layers of windowed table `table` (from 1 on) see it: one of a sequence that begins
    at the first place that is read. Its rotary positions mean nothing.
    """
    layout = step.memory.layout
    assert layout.windows is not None
    first = layout.windows.first_read(step.start, layout.block_size)
    blocks = step.window_tables[table - 1][first - step.window_first :]
    return replace(step, block_table=blocks, start=step.start - first * layout.block_size)


def window_cuts(sequences: Sequence[SequenceStep]) -> list[list[SequenceStep]]:
    """Return the step as the layers of each windowed table see it; its sequences have equal layouts. Pages
    of recurrent states are no table of an attention.
    """
    layout = sequences[0].memory.layout
    windows = layout.windows if layout.states is None else None
    cuts = () if windows is None else range(1, windows.tables + 1)
    return [[cut_to_window(step, table) for step in sequences] for table in cuts]


class AbortWords:
    """Abort flags of a step, one int32 a sequence: another thread sets them, the step reads them between
    layers.

    A sequence whose word is set writes no more keys and values from the next layer on; when all are set the
    step ends. A store of one aligned int32 is atomic on every machine that we run on, so that no lock is
    needed; a native step may read the array directly.
    """

    def __init__(self, count: int) -> None:
        self.words: npt.NDArray[np.int32] = np.zeros(count, dtype=np.int32)

    def abort(self, index: int) -> None:
        """Stop the sequence at `index` of the step."""
        self.words[index] = 1

    def is_aborted(self, index: int) -> bool:
        """Return whether the sequence at `index` was aborted."""
        return bool(self.words[index])

    def all_aborted(self) -> bool:
        """Return whether every sequence of the step was aborted."""
        return bool(self.words.all())


class BatchError(ValueError):
    """A step that cannot be computed: an empty chunk, a block table too short, a token outside the
    vocabulary, more rows of logits than tokens, a slot without an adapter, embeddings beside the chunk,
    parents that make no tree.
    """


def given_embeddings(
    sequences: Sequence[SequenceStep], begins: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the places (int64 `[rows]`) in the step's flat list of tokens that have embeddings of their own,
    and these `[rows, hidden]`; None without any.

    `begins` are the places of the sequences' first tokens; by default they follow one another.
    """
    if not any(step.embeddings for step in sequences):
        return None
    if begins is None:
        begins = [0, *accumulate(len(step.token_ids) for step in sequences)]
    given = [
        (begin + one.at, one.rows)
        for begin, step in zip(begins, sequences, strict=False)
        for one in step.embeddings
    ]
    places = [torch.arange(begin, begin + len(rows)) for begin, rows in given]
    return torch.cat(places), torch.cat([rows for _, rows in given])


def put_rows(x_TH: torch.Tensor, given: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    """Write what `given_embeddings` returned into embeddings `[T, hidden]`, at its places."""
    if given is not None:
        places, rows = given
        x_TH[places.to(x_TH.device)] = rows[:, : x_TH.shape[1]].to(x_TH)


def add_rows_after(x_TH: torch.Tensor, given: tuple[torch.Tensor, torch.Tensor] | None, layer: int) -> None:
    """Add the rows of `given_embeddings` that the residual `[T, hidden]` takes after a layer, if there are
    any, at their places.
    """
    hidden = x_TH.shape[1]
    begin = (layer + 1) * hidden
    if given is not None and begin < given[1].shape[1]:
        places, rows = given
        x_TH[places.to(x_TH.device)] += rows[:, begin : begin + hidden].to(x_TH)


def rotary_positions(sequences: Sequence[SequenceStep]) -> npt.NDArray[np.int64]:
    """Return the positions by which the step's tokens are rotated, in a row: `[T]`, or `[3, T]` where some
    are those of a grid.
    """
    each = [step.positions for step in sequences]
    if all(step.grid is None for step in sequences):
        return np.concatenate(each)
    return np.concatenate([np.broadcast_to(one, (AXES, one.shape[-1])) for one in each], axis=1)


def visible_ends(step: SequenceStep) -> npt.NDArray[np.int64] | None:
    """Return for each token of a chunk the first position that it does not see, `[tokens]`; None where that
    is the one after its own for all.
    """
    if not any(one.whole for one in step.embeddings):
        return None
    ends = np.arange(step.start + 1, step.start + 1 + len(step.token_ids))
    for one in step.embeddings:
        if one.whole:
            ends[one.at : one.at + len(one.rows)] = step.start + one.at + len(one.rows)
    return ends


def check_batch(
    sequences: Sequence[SequenceStep], vocab_size: int, adapter_slots: Collection[int] = ()
) -> None:
    """Raise BatchError, naming the row, for a step that would read or write outside its memory, or that names
    an adapter's slot that is not among `adapter_slots`.
    """
    for row, step in enumerate(sequences):
        layout = step.memory.layout
        end = step.start + len(step.token_ids)
        if not step.token_ids:
            raise BatchError(f"row {row}: no tokens to compute")
        if step.start < 0:
            raise BatchError(f"row {row}: starts before position 0")
        if not -step.start <= step.shift <= 0:
            raise BatchError(f"row {row}: positions shifted by {step.shift}")
        if step.grid is not None and step.grid.shape != (AXES, len(step.token_ids)):
            raise BatchError(f"row {row}: {step.grid.shape} positions of {len(step.token_ids)} tokens")
        if not 0 <= step.logit_rows <= len(step.token_ids):
            raise BatchError(f"row {row}: {step.trailing} rows of logits of {len(step.token_ids)} tokens")
        blocks = layout.blocks_for(end)
        if blocks > len(step.block_table):
            raise BatchError(f"row {row}: {end} tokens do not fit into {len(step.block_table)} blocks")
        if min(step.token_ids) < 0 or max(step.token_ids) >= vocab_size:
            raise BatchError(f"row {row}: a token id outside the vocabulary of {vocab_size}")
        used = step.block_table[:blocks]
        for given in step.embeddings:
            if given.at < 0 or given.at + len(given.rows) > len(step.token_ids):
                raise BatchError(f"row {row}: embeddings of tokens that the chunk does not have")
        if min(used) < 0 or max(used) >= step.memory.num_blocks:
            raise BatchError(f"row {row}: a block outside the memory of {step.memory.num_blocks} blocks")
        if (why := _window_fault(step, blocks)) is not None:
            raise BatchError(f"row {row}: {why}")
        if not 0 < step.kept_tokens <= len(step.token_ids):
            raise BatchError(f"row {row}: {step.settled} of {len(step.token_ids)} tokens are no guesses")
        if step.parents is not None and not _is_tree(step.parents, len(step.token_ids)):
            raise BatchError(f"row {row}: the parents of its tokens make no tree")
        if step.adapter is not None and step.adapter not in adapter_slots:
            raise BatchError(f"row {row}: there is no adapter in slot {step.adapter}")


def _window_fault(step: SequenceStep, blocks: int) -> str | None:
    """Return what is wrong with the windowed tables of a step that reaches `blocks` places."""
    windows = step.memory.layout.windows
    if len(step.window_tables) != (0 if windows is None else windows.tables):
        return f"{len(step.window_tables)} tables of layers with a window"
    if windows is None:
        return None
    if not 0 <= step.window_first <= windows.first_read(step.start, step.memory.layout.block_size):
        return f"reads blocks of its window before place {step.window_first}"
    for table in step.window_tables:
        if step.window_first + len(table) < blocks:
            return f"{len(table)} blocks of its window from place {step.window_first} on, of {blocks}"
        if min(table) < 0 or max(table) >= step.memory.num_blocks:
            return f"a block outside the memory of {step.memory.num_blocks} blocks"
    return None


def _is_tree(parents: Sequence[int], tokens: int) -> bool:
    return len(parents) == tokens and all(-1 <= parent < place for place, parent in enumerate(parents))


@dataclass(frozen=True)
class StepOutput:
    """A token for each row of logits that was sampled, and the logits of the others."""

    tokens: Sequence[Sampled | SampleFailure | None]
    """Tokens, one entry a row; None: its logits are in `logits`."""
    logits: torch.Tensor
    """Float32 `[rows that were not sampled, vocab]` on the CPU, in order."""
    hidden: torch.Tensor | None = None
    """Float32 `[rows of logits, hidden]` on the CPU: the rows behind the final norm, where the backend gives
    them (`HiddenRowsBackend`). Those of aborted sequences must not be used.
    """
    features: torch.Tensor | None = None
    """Float32 `[tokens, taps * hidden]` on the CPU, of all tokens of the step in order: the residual stream
    before each tapped layer, or behind the final norm, where the backend gives it (`FeatureBackend`). As to
    aborted ones, as above.
    """

    @classmethod
    def logits_only(cls, logits: torch.Tensor) -> StepOutput:
        """Return the output of a step that sampled nothing, with logits `[rows, vocab]`."""
        return cls([None] * logits.shape[0], logits)


class Launched(Protocol):
    """A step that was launched on a backend."""

    def done(self) -> bool:
        """Return whether `collect` would not wait."""
        ...

    def collect(self) -> StepOutput:
        """Wait for the step and return its output; call it once, and in the order of the launches."""
        ...


class DecodeRecording(NamedTuple):
    """A decode step that a backend records once, for all batches that it holds."""

    rows: int
    adapted: bool
    """True where rows may have adapters."""


def can_sample_on_device(row: SampleRow) -> SampleRow | None:
    """Return the row if a device can sample it; else None: the host has to, or more is asked for."""
    return row if row.params.on_device and not row.ruled else None
