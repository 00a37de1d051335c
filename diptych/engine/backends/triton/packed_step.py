"""Rows of a step as its kernels read them: tokens, and where in which memory their keys and values lie.

Within a memory decode rows come before chunks, so that every kernel sees one contiguous range of rows.
`step_plan.pack_step` makes a step of a batch; the graphs make theirs of buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diptych.engine.backends.triton.recurrent.step_states import PackedStates

NO_BLOCK = -1
"""Block of a token whose keys and values are written nowhere, as kernels/gpu/rotary_write.py has it."""


@dataclass(frozen=True)
class DecodeRows:
    """Decode rows of several sequences: rows `rows` of the step."""

    rows: slice
    tables: torch.Tensor
    """int32 `[rows, n]`, short ones padded with blocks that exist."""
    lengths: torch.Tensor
    """int32 `[rows]`: tokens to attend to, the row's own included."""


@dataclass(frozen=True)
class ChunkRows:
    """Several tokens of each of several sequences, packed: rows `rows` of the step."""

    rows: slice
    tables: torch.Tensor
    """int32 `[sequences, n]`."""
    starts: torch.Tensor
    """int32 `[sequences]`: tokens before the chunk."""
    offsets: torch.Tensor
    """int32 `[sequences + 1]`: where in `rows` each chunk begins, and the end."""
    max_tokens: int
    """Tokens of the longest chunk."""
    context_tokens: int
    """Tokens of all sequences together: those before the chunks, and the chunks."""
    tree: torch.Tensor | None = None
    """int64 `[tokens of the chunks, 2]` of trees of tokens, as kernels/gpu/paged_prefill.py has it."""


@dataclass(frozen=True)
class Group:
    """The rows whose keys and values lie in one memory."""

    blocks: torch.Tensor
    rows: slice
    decodes: DecodeRows | None
    chunks: tuple[ChunkRows, ...]
    base: torch.Tensor | None = None
    """int64 `[1]`: elements from `blocks`, which only has the layout, to the memory; None: `blocks` is it."""


@dataclass(frozen=True)
class SeeingRows:
    """A chunk with tokens that see beyond their own position: its attention is computed by itself."""

    rows: slice
    blocks: torch.Tensor
    table: torch.Tensor
    start: int
    ends: torch.Tensor
    """int64 `[tokens]`: the first position that each does not see."""


@dataclass(frozen=True)
class TableRows:
    """Blocks of a step's rows in one table: those of all layers, or of some (`KVLayout.windows`)."""

    block_ids: torch.Tensor
    """int64 `[T]`: where each token's keys and values go; NO_BLOCK is nowhere."""
    groups: tuple[Group, ...]
    seeing: tuple[SeeingRows, ...] = ()


@dataclass(frozen=True)
class PackedStep:
    """Input of the layers; all tensors on the device."""

    tokens: torch.Tensor
    """int64 `[T]`."""
    positions: torch.Tensor
    """int64 `[T]`, by which queries and keys are rotated; `[3, T]` where images lie on grids."""
    lanes: torch.Tensor
    """int32 `[T]`: place of each token in its block."""
    tables: tuple[TableRows, ...]
    """Blocks of the rows, that of all tokens first, then each windowed one."""
    places: tuple[tuple[int, int], ...] = ()
    """`WindowGroups.places` where there are windowed tables."""
    adapters: torch.Tensor | None = None
    """int32 `[T]`: slot of each row's adapter, -1 for the base; None where no row has one."""
    adapter_scratch: torch.Tensor | None = None
    """Room for what lies between A and B of adapters (`DeviceAdapters.scratch`)."""
    states: PackedStates | None = None
    """Pages of recurrent states; None for a model without such layers."""
    recorded: bool = False
    """True for the input of a recording: nothing of the step may come to the host."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def seen_by(self, layer: int) -> tuple[TableRows, int]:
        """Return the table of a layer, and the layer's place in a block."""
        table, slot = self.places[layer] if self.places else (0, layer)
        return self.tables[table], slot


@dataclass(frozen=True)
class PlacedStep:
    """A packed step, and where the batch's sequences are in it."""

    step: PackedStep
    logit_rows: torch.Tensor
    """int64: rows after which logits are wanted, in the order of the batch."""
    logit_owners: tuple[int, ...]
    """The sequence of each."""
    spans: tuple[slice, ...]
    """Rows of each sequence of the batch."""

    def abort_row(self, sequence: int) -> None:
        """Let a sequence write nothing from the next layer that is launched on."""
        for table in self.step.tables:
            table.block_ids[self.spans[sequence]].fill_(NO_BLOCK)
        if self.step.states is not None:
            self.step.states.abort_rows(self.spans[sequence])
