"""Two groups of layers over one pool of equal blocks: those that read all tokens, and those with a window.

A layer with a window of W tokens never reads what lies further back. So a sequence keeps blocks of two kinds:
*full* ones, one a place (a stretch of `block_size` tokens) for all of its tokens, with keys and values of the
layers of the first group; and *windowed* ones, for its last tokens only, with those of the other layers. All
blocks have room for equally many layers, so that one pool and one free list serve both kinds. A place takes
one full block and `tables` windowed ones: Gemma 3 has five layers with a window beside each one without.

The first group holds the layers without a window. Where every layer has one, it holds an eighth of them: the
keys of the prefix cache form a chain of full blocks.

Pure numbers; what lies in which block is decided in window_table.py and window_prefix.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALL_WINDOWED_SHARE = 8
"""Number of layers of which one is in the first group, where all have a window."""

MOST_RINGS = 4
"""Most blocks of a prompt's ring, in those of the shortest one, for what it shares with earlier prompts."""


@dataclass(frozen=True)
class WindowGroups:
    """The blocks that layers lie in. `places` has (table, slot) of each layer: table 0 is that of full
    blocks, 1 and up are windowed ones; slot is the layer's place inside a block.
    """

    window: int
    """Tokens that the layers of the second group see, the present one included."""
    slots: int
    """Layers of a block."""
    tables: int
    """Windowed blocks of a place."""
    places: tuple[tuple[int, int], ...]

    @property
    def blocks_per_place(self) -> int:
        """Blocks of a place that has both kinds."""
        return 1 + self.tables

    def first_read(self, position: int, block_size: int) -> int:
        """Return the first place whose windowed blocks the token at `position` reads."""
        return max(0, position - self.window + 1) // block_size

    def first_kept(self, position: int, block_size: int) -> int:
        """Return the first place whose windowed blocks are kept for a sequence whose last token is at
        `position`: those that a token behind the last full block would read, too, so that it can be hit.
        """
        return self.first_read(position // block_size * block_size, block_size)

    def span(self, chunk: int, block_size: int) -> int:
        """Return the most places that a chunk of so many tokens reads or writes, at least those that are kept
        behind a prompt. With the block size, that is `window` and one chunk.
        """
        return max(0, self.window + chunk - 2) // block_size + 2

    def ring_blocks(self, places: int, chunk: int, block_size: int, tail: int = 0) -> int:
        """Return the blocks beside the full ones in which a prompt's `places` are computed by chunks of that
        size.

        The last `tail` places are to be there in the end, if that takes no more than the longest ring has.
        """
        shortest, longest = self.ring_places(chunk, block_size)
        return self.tables * min(places, tail if shortest < tail <= longest else shortest)

    def ring_of(self, blocks: Sequence[int], places: int, tail: int = 0) -> Sequence[int]:
        """Return the ring of a prompt of so many places in all, from the `ring_blocks` of it: entries of
        `tables` blocks each (`PromptWindow`).
        """
        return blocks

    def ring_places(self, chunk: int, block_size: int) -> tuple[int, int]:
        """Return the places of the shortest ring of a prompt that is computed by such chunks, and of the
        longest.
        """
        shortest = self.span(chunk, block_size)
        return shortest, MOST_RINGS * shortest

    def kept(self, block_size: int) -> int:
        """Return the most places whose windowed blocks are kept for a sequence: those before its last place
        that a token behind a full block reads, and that one.
        """
        return 1 + -(-(self.window - 1) // block_size)


def window_groups(windows: Sequence[int | None]) -> WindowGroups | None:
    """Return the groups of a model whose layers have these windows; None where one group serves all.

    That is a model without windows, with windows of several lengths, or with fewer layers that have one than
    layers that have none: windowed blocks would be emptier than what they save.
    """
    lengths = {window for window in windows if window is not None}
    if len(lengths) != 1 or len(windows) < 2:
        return None
    full = [layer for layer, window in enumerate(windows) if window is None]
    if not full:
        full = list(range(max(1, len(windows) // ALL_WINDOWED_SHARE)))
    slots = len(full)
    windowed = [layer for layer in range(len(windows)) if layer not in set(full)]
    if len(windowed) < slots:
        return None
    places = {layer: (0, slot) for slot, layer in enumerate(full)}
    places.update({layer: (1 + at // slots, at % slots) for at, layer in enumerate(windowed)})
    tables = -(-len(windowed) // slots)
    return WindowGroups(lengths.pop(), slots, tables, tuple(places[layer] for layer in range(len(windows))))
