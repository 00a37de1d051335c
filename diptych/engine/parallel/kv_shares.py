"""The share of every block that a process of a group computes: its layers, and KV heads of its parts. Pure.

Processes that map one memory write their shares of it. A process with a memory of its own holds its share
alone, in blocks that are as much smaller, of the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.parallel.parts import Part, parts_of_rank
from diptych.engine.parallel.stages import Grid, Stage


@dataclass(frozen=True)
class KVShare:
    """Layers in a row, and KV heads in a row of each."""

    layers: range
    heads: range

    def of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the share of `[..., layers, kinds, heads, numbers]`, a view."""
        layers = blocks.narrow(-4, self.layers.start, len(self.layers))
        return layers.narrow(-2, self.heads.start, len(self.heads))

    def narrow(self, layout: KVLayout) -> KVLayout:
        """Return the layout of blocks that hold this share of those of `layout` alone."""
        return replace(layout, num_layers=len(self.layers), num_kv_heads=len(self.heads))


def whole_share(layout: KVLayout) -> KVShare:
    """Return the share of a process that holds whole blocks."""
    return KVShare(range(layout.block_layers), range(layout.num_kv_heads))


def kv_shares(parts: Sequence[Part], stages: Sequence[Stage], grid: Grid) -> tuple[KVShare, ...]:
    """Return the share of each process of a group, by its number.

    Shares overlap where parts of two ranks read one KV head: both have the same bytes of it.
    """
    shares = []
    for number in range(grid.size):
        stage, rank = grid.place(number)
        own = parts_of_rank(len(parts), rank, grid.ranks)
        heads = range(parts[own[0]].kv_heads.start, parts[own[-1]].kv_heads.stop)
        shares.append(KVShare(stages[stage].layers, heads))
    return tuple(shares)
