"""Blocks behind a sliding window: the windowed blocks of one attempt's sequences.

Where layers with a window have blocks of their own (`KVLayout.windows`), a sequence holds them for the last
places alone. What no later token reads is given up when a token comes, and the windowed blocks of its last
places enter the prefix cache where a prompt or an answer ends: from there a request can go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.window_groups import WindowGroups
from diptych.engine.kv.window_prefix import WindowPrefix
from diptych.engine.kv.window_table import PromptWindow, WindowTable

if TYPE_CHECKING:
    from decode_worker.sequence import DecodeSequence


class WindowRows:
    """Windowed blocks of the prompt and the sequences of one attempt; each holds its own once."""

    def __init__(self, pool: BlockPool, memory: KVMemory, groups: WindowGroups) -> None:
        self._pool = pool
        self._memory = memory
        self._groups = groups
        self._block_size = memory.layout.block_size
        self._prefix = WindowPrefix(pool, groups, self._block_size)
        self._prompt: WindowTable | None = None

    def adopt(self, window: PromptWindow, num_tokens: int) -> list[int]:
        """Take those blocks of a prompt that stay behind it; return the others, which are held, too."""
        size = self._block_size
        first, end = self._groups.first_kept(num_tokens - 1, size), -(-num_tokens // size)
        tables = [list(table) for table in window.tables_of(first, end)]
        self._prompt = WindowTable(first, tables)
        kept = set(self._prompt.blocks())
        return [block for block in window.held if block not in kept]

    def publish_prompt(self, keys: Sequence[bytes]) -> None:
        """Enter the full ones of the prompt into the prefix cache; `keys` are those of its full blocks."""
        if self._prompt is not None:
            self._insert(self._prompt, keys)

    def publish_shared(self, window: PromptWindow, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Enter those before the place where the prompt parts from others; `blocks` are its full ones."""
        self._prefix.insert_shared(window, blocks, keys)

    def publish(self, sequence: DecodeSequence) -> None:
        """Enter the full ones of a sequence that ends into the prefix cache."""
        if sequence.window is not None:
            self._insert(sequence.window, sequence.block_keys)

    def start(self, sequence: DecodeSequence) -> None:
        """Let a sequence begin with those of the prompt."""
        if self._prompt is not None:
            self._pool.retain(self._prompt.blocks())
            sequence.window = self._prompt.copy()

    def release_prompt(self) -> None:
        """Give up those of the prompt."""
        if self._prompt is not None:
            self._pool.release(self._prompt.blocks())
            self._prompt = None

    def fork(self, parent: DecodeSequence, child: DecodeSequence) -> None:
        """Let `child` begin with those of its parent that it reads."""
        if parent.window is not None:
            self._pool.retain(parent.window.blocks())
            child.window = parent.window.copy()
            self._pool.release(self.take_unread(child))

    def take_unread(self, sequence: DecodeSequence) -> list[int]:
        """Take those that no later token of a sequence reads from its table; return them."""
        if sequence.window is None:
            return []
        first = self._groups.first_kept(sequence.computed, self._block_size)
        return sequence.window.take_before(first)

    def grow(self, sequence: DecodeSequence, place: int, allocate: Callable[[], int]) -> None:
        """Give a sequence the blocks of a new place."""
        if sequence.window is not None:
            sequence.window.put(place, [allocate() for _ in range(self._groups.tables)])

    def own(self, sequence: DecodeSequence, place: int, writable: Callable[[int], int | None]) -> None:
        """Copy those of a place that others hold, too, before a token is written there."""
        if sequence.window is None:
            return
        blocks = sequence.window.at(place)
        for table, block in enumerate(blocks):
            if (fresh := writable(block)) is not None:
                self._memory.copy_block(block, fresh)
                blocks[table] = fresh
                sequence.window.put(place, blocks)

    def move_lanes(self, sequence: DecodeSequence, moves: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values from lane to lane (`KVMemory.move_lanes`)."""
        if sequence.window is None:
            return
        begin = sequence.window.first * self._block_size
        shifted = [(source - begin, target - begin) for source, target in moves]
        for table in sequence.window.tables:
            self._memory.move_lanes(table, shifted)

    def _insert(self, table: WindowTable, keys: Sequence[bytes]) -> None:
        for place in range(max(table.first, table.published), min(table.end, len(keys))):
            self._prefix.insert(table.at(place), keys[place])
        table.published = len(keys)
