"""The simulated model, dealt to the ranks of a group: what each layer and KV head has of a token.

A cell (layer, head) keeps a token's eight bytes (model.py), changed in a way of its own. So each process can
tell what a cell of its share holds, and a step in which the cells of all ranks do not agree has read a block
that lacks a share, or has one of other tokens, of another grant, or of another head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64_intdigest

from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.models.shape import LayerShape, ModelShape, Rotation
from diptych.engine.parallel.kv_shares import KVShare, kv_shares, whole_share
from diptych.engine.parallel.parts import deal_parts
from diptych.engine.parallel.stages import Grid, deal_stages
from tests.simulation.model import BLOCK_SIZE, FINGERPRINT, MAX_CONTEXT, VOCABULARY, SimulatedRunner

LAYERS, KV_HEADS, QUERY_HEADS = 2, 3, 12
SUM_PARTS = 12
"""A multiple of 1, 2, 3 and 4 ranks, and more than there are KV heads: several ranks hold some of them."""
CELL_LAYOUT = KVLayout(LAYERS, KV_HEADS, 1, BLOCK_SIZE, torch.float32)
CELL_FINGERPRINT = replace(
    FINGERPRINT, num_layers=LAYERS, num_kv_heads=KV_HEADS, sum_parts=SUM_PARTS, kv_layout=CELL_LAYOUT.name
)
_MASKS = np.array(
    [[xxh3_64_intdigest(bytes([layer, head])) for head in range(KV_HEADS)] for layer in range(LAYERS)],
    dtype=np.uint64,
)
Entries = npt.NDArray[np.uint64]
_SHAPE = ModelShape(
    family="simulated",
    vocab_size=VOCABULARY,
    hidden_size=QUERY_HEADS * 2,
    num_heads=QUERY_HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=2,
    intermediate_size=64,
    rms_eps=1e-5,
    max_context=MAX_CONTEXT,
    layers=(LayerShape(),) * LAYERS,
    rotations=(Rotation(theta=1e4, width=2),),
)


def dealt_shares(grid: Grid) -> tuple[KVShare, ...]:
    """Return the share of each process of a group, as the product deals it."""
    return kv_shares(deal_parts(_SHAPE, SUM_PARTS), deal_stages(_SHAPE, grid.stages), grid)


class CellsDiffer(Exception):
    """Cells of one token that are of different ones."""


class HeldCells:
    """Cells of a share: in a memory of whole blocks, or in one that holds the share alone."""

    def __init__(self, share: KVShare, *, alone: bool) -> None:
        self._masks = _MASKS[share.layers.start : share.layers.stop, share.heads.start : share.heads.stop]
        layer, head = (share.layers.start, share.heads.start) if alone else (0, 0)
        self._layers = slice(share.layers.start - layer, share.layers.stop - layer)
        self._heads = slice(share.heads.start - head, share.heads.stop - head)

    def read(self, step: SequenceStep) -> Entries:
        """Return the entries of the tokens before a step's, `[tokens]`. Raises CellsDiffer."""
        blocks = list(step.block_table[: CELL_LAYOUT.blocks_for(step.start)])
        found = self._cells(step.memory)[blocks].transpose(0, 4, 1, 3, 2)  # block, lane, layer, head, kind
        cells = np.ascontiguousarray(found).view(np.uint64).reshape(-1, *self._masks.shape)[: step.start]
        entries = (cells ^ self._masks).reshape(step.start, self._masks.size)
        different = np.flatnonzero((entries != entries[:, :1]).any(axis=1))
        if len(different):
            at = int(different[0])
            raise CellsDiffer(f"token {at} of block {blocks[at // BLOCK_SIZE]} is another one in some head")
        return entries[:, 0]

    def write(self, step: SequenceStep, entries: Entries) -> None:
        """Write the entries of a step's tokens, `[tokens]`."""
        cells, kinds = self._cells(step.memory), (entries[:, None, None] ^ self._masks).view(np.uint32)
        for place, position in enumerate(range(step.start, step.start + len(entries))):
            block = step.block_table[position // BLOCK_SIZE]
            own = kinds[place].reshape(*self._masks.shape, 2).transpose(0, 2, 1)
            cells[block, :, :, :, position % BLOCK_SIZE] = own

    def _cells(self, memory: KVMemory) -> npt.NDArray[np.uint32]:
        """Return a view `[blocks, layers, kinds, heads, lanes]` of the share."""
        return memory.data.numpy().view(np.uint32)[:, self._layers, :, self._heads]


def agreed(reads: Sequence[Entries]) -> Entries:
    """Return what all ranks have read of a sequence. Raises CellsDiffer."""
    for other in reads[1:]:
        if not np.array_equal(other, reads[0]):
            at = int(np.flatnonzero(other != reads[0])[0])
            raise CellsDiffer(f"token {at} is another one in some rank")
    return reads[0]


class CellRunner(SimulatedRunner):
    """A runner that computes the model by itself, in blocks of all cells."""

    cells = HeldCells(whole_share(CELL_LAYOUT), alone=False)

    def read(self, sequence: SequenceStep) -> bytearray:
        """Return the entries before the step's."""
        return bytearray(self.cells.read(sequence).tobytes())

    def write(self, sequence: SequenceStep, entries: bytearray) -> None:
        """Write those of the step."""
        self.watch(sequence)
        self.cells.write(sequence, np.frombuffer(entries, dtype=np.uint64)[sequence.start :])
