"""Pages of recurrent states: the blocks of a place that hold the states behind its last token.

A recurrent layer is like one with a window of two tokens: a token reads what the one before it left. So its
states lie in blocks of a second kind, as keys and values behind a sliding window do (window_groups.py): those
of a place, its *page*, hold the states behind the last token of the place that was computed. A token at
position p reads the page of place `(p - 1) // block_size` and leaves its states in that of place
`p // block_size`; where a border is crossed the page before stays as it is, for a prefix hit that ends there.

A page's bytes follow one another through its blocks: a count of tokens, then the states of each recurrent
layer, in float32. Writing a state twice is not what writing it once is, so that the count says of how many
tokens it is the state: one that is read in the wrong place, or after it was advanced, is found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

ALIGNED = 64
"""Bytes at whose multiples layers begin, and that the count of tokens takes."""
_FLOAT = 4


@dataclass(frozen=True)
class StateLayout:
    """Layout of a page."""

    layers: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]
    """Numbers of the recurrent layers, with the shapes of each one's states."""
    block_bytes: int
    """Bytes of a block that a page uses, a multiple of `ALIGNED`."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page's content."""
        return page_bytes(shapes for _, shapes in self.layers)

    @property
    def blocks(self) -> int:
        """Blocks of a page."""
        return -(-self.page_bytes // self.block_bytes)

    def extents(self) -> dict[int, tuple[int, int]]:
        """Return the bytes of a page, from and to, that hold each layer's states."""
        return state_extents(self.layers)


def state_extents(layers: Sequence[tuple[int, tuple[tuple[int, ...], ...]]]) -> dict[int, tuple[int, int]]:
    """Return the bytes of a page, from and to, that hold the states of each of `StateLayout.layers`."""
    sizes = [_state_bytes(shapes) for _, shapes in layers]
    begins = accumulate(map(_aligned, sizes), initial=ALIGNED)
    return {
        layer: (begin, begin + size) for (layer, _), size, begin in zip(layers, sizes, begins, strict=False)
    }


def page_bytes(layers: Iterable[tuple[tuple[int, ...], ...]]) -> int:
    """Return the bytes of a page with the states of layers that have these shapes."""
    return ALIGNED + sum(_aligned(_state_bytes(shapes)) for shapes in layers)


def state_layout(layers: Sequence[tuple[int, tuple[tuple[int, ...], ...]]], block_bytes: int) -> StateLayout:
    """Return the layout of pages in blocks of `block_bytes`. Raises ValueError for blocks that are too small
    or begin at bytes where float32 cannot.
    """
    if block_bytes < ALIGNED or block_bytes % 8:
        raise ValueError(f"blocks of {block_bytes} bytes hold no recurrent states: choose another block size")
    return StateLayout(tuple(layers), block_bytes // ALIGNED * ALIGNED)


class StatePages:
    """Reader and writer of pages over the bytes of a memory's blocks, uint8 `[blocks, bytes]`."""

    def __init__(self, layout: StateLayout, blocks: torch.Tensor) -> None:
        self._shapes = dict(layout.layers)
        self._extents = layout.extents()
        self._block_bytes = layout.block_bytes
        self._blocks = blocks

    def counts(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the tokens behind which the states are, int64 `[pages]`; `pages` are blocks `[pages, n]`."""
        return self._read(pages, 0, 8).view(torch.int64).squeeze(1)

    def set_counts(self, pages: torch.Tensor, counts: torch.Tensor) -> None:
        """Write the tokens behind which the states are, int64 `[pages]`."""
        self._write(pages, 0, counts.unsqueeze(1).contiguous().view(torch.uint8))

    def states(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return copies of a layer's states, float32 `[pages, *shape]` each."""
        if not (shapes := self._shapes[layer]):
            return ()
        flat = self._read(pages, *self._extents[layer]).view(torch.float32)
        parts = flat.split([math.prod(shape) for shape in shapes], dim=1)
        return tuple(part.reshape(len(pages), *shape) for part, shape in zip(parts, shapes, strict=True))

    def set_states(self, layer: int, pages: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Write a layer's states, float32 `[pages, *shape]` each."""
        if states:
            flat = torch.cat([state.flatten(1) for state in states], dim=1)
            self._write(pages, self._extents[layer][0], flat.contiguous().view(torch.uint8))

    def _read(self, pages: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        found = [self._blocks[pages[:, block], low:high] for block, low, high in self._pieces(begin, end)]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def _write(self, pages: torch.Tensor, begin: int, content: torch.Tensor) -> None:
        at = 0
        for block, low, high in self._pieces(begin, begin + content.shape[1]):
            self._blocks[pages[:, block], low:high] = content[:, at : at + high - low]
            at += high - low

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the number of each block of a page that has some of its bytes, with the bytes' ends in it."""
        size = self._block_bytes
        for block in range(begin // size, -(-end // size)):
            yield block, max(begin - block * size, 0), min(end - block * size, size)


def _state_bytes(shapes: tuple[tuple[int, ...], ...]) -> int:
    return _FLOAT * sum(math.prod(shape) for shape in shapes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
