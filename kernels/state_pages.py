"""Recurrent states in pages of the pool: the sequences of a step whose states one launch reads and leaves.

A page is as many blocks as the states of all recurrent layers of one sequence take, float32, its bytes one
after the other through the blocks (diptych/engine/kv/state_layout.py). Float 0 and 1 are its count of tokens,
an int64. Kernels change states where they lie; here is what they mean.

Between the first recurrent layer of a step and the end of the last one its pages are of no count, -1: a step
that fails or is aborted halfway leaves pages from which nothing goes on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch

NO_PAGE = -1
"""Block of a page that is not written, as kernels/gpu/state_pages.py has it."""
_NO_COUNT = -1


@dataclass(frozen=True)
class StateRuns:
    """Sequences of a step whose pages, of n blocks each, lie in one memory.

    S sequences; their rows are cut into G stretches, behind some of which states are kept. All tensors are on
    the device.
    """

    pool: torch.Tensor
    """float32 `[blocks, floats from one block to the next]`: the memory."""
    block_floats: int
    """Floats of a block that a page uses, a multiple of 16."""
    rows: slice
    """Rows of the step that the sequences have."""
    read: torch.Tensor
    """int32 `[S, n]`: blocks of the page with the states before; not looked at where `starts` is 0."""
    written: torch.Tensor
    """int32 `[G, n]`: the page that gets the states behind each cut; NO_PAGE: none does. A sequence without
    one behind its first cut is not computed: it is padding, or was aborted.
    """
    starts: torch.Tensor
    """int32 `[S]`: tokens before the step; where that is 0, states before are zeros."""
    live: torch.Tensor
    """int32 `[S]`, which `begin_states` writes: 1 for a sequence that is computed."""
    offsets: torch.Tensor | None = None
    """int32 `[S + 1]`: first row of each sequence within `rows`, and the end; None: each has one row, and one
    cut.
    """
    cuts: torch.Tensor | None = None
    """int32 `[S + 1]`: the first cut of each sequence, and the end."""
    ends: torch.Tensor | None = None
    """int32 `[G]`: the row, within `rows`, behind the last one of each cut."""
    max_tokens: int = 1
    """Rows of the longest sequence."""
    base: torch.Tensor | None = None
    """int64 `[1]`: floats from `pool`, which only has the layout, to the memory; None: `pool` is it."""

    @property
    def sequences(self) -> int:
        """Number of sequences, padding included."""
        return len(self.starts)

    @property
    def page_blocks(self) -> int:
        """Blocks of a page."""
        return self.written.shape[1]


@dataclass(frozen=True)
class Stretch:
    """Rows of a sequence up to a cut: `rows` of its run, and the page that gets the states behind them."""

    rows: slice
    page: list[int] | None
    tokens: int
    """Tokens behind which these states are."""


class StatePool:
    """Reader and writer of the pages of one run on a CPU: the meaning of the kernels' access."""

    def __init__(self, runs: StateRuns) -> None:
        self._runs = runs
        self._memory = runs.pool if runs.base is None else _memory_at(runs)

    def before(self, sequence: int, first: int, size: int) -> torch.Tensor:
        """Return a copy of `size` floats of the states before a sequence, from a page's float `first` on."""
        runs = self._runs
        if size == 0 or int(runs.starts[sequence]) == 0:
            return torch.zeros(size)
        return self._places(runs.read[sequence].tolist(), first, size)

    def keep(self, page: list[int] | None, first: int, numbers: torch.Tensor) -> None:
        """Write numbers into a page, from float `first` on."""
        for block, low, high, begin in () if page is None else self._pieces(page, first, numbers.numel()):
            self._memory[block, low:high] = numbers.flatten()[begin : begin + high - low]

    def count(self, sequence: int) -> int:
        """Return the tokens of the page that a sequence reads."""
        block = int(self._runs.read[sequence, 0])
        return int(self._memory[block, :2].view(torch.int64))

    def set_count(self, page: list[int] | None, tokens: int) -> None:
        """Write the tokens of a page."""
        if page is not None:
            self._memory[page[0], :2] = torch.tensor([tokens]).view(torch.float32)

    def stretches(self, sequence: int) -> list[Stretch]:
        """Return the stretches of a sequence; none if it is not computed."""
        runs = self._runs
        pages = [None if page[0] < 0 else page for page in runs.written.tolist()]
        start = int(runs.starts[sequence])
        if runs.offsets is None or runs.cuts is None or runs.ends is None:
            found = [Stretch(slice(sequence, sequence + 1), pages[sequence], start + 1)]
        else:
            begin, cuts, found = int(runs.offsets[sequence]), runs.cuts.tolist(), []
            low = begin
            for cut in range(cuts[sequence], cuts[sequence + 1]):
                high = int(runs.ends[cut])
                found.append(Stretch(slice(low, high), pages[cut], start + high - begin))
                low = high
        return found if found and found[0].page is not None else []

    def computed(self, sequence: int) -> list[Stretch]:
        """Return the stretches of a sequence that is computed in this launch; none of others."""
        return self.stretches(sequence) if self._runs.live[sequence] else []

    def _places(self, page: list[int], first: int, size: int) -> torch.Tensor:
        pieces = [self._memory[block, low:high] for block, low, high, _ in self._pieces(page, first, size)]
        return torch.cat(pieces)

    def _pieces(self, page: list[int], first: int, size: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield block, first and last float in it, and how many came before."""
        width, done = self._runs.block_floats, 0
        while done < size:
            number, low = divmod(first + done, width)
            high = min(width, low + size - done)
            yield page[number], low, high, done
            done += high - low


def begin_states(runs: StateRuns) -> torch.Tensor:
    """Decide which sequences are computed, and return `live`: those that go on at the count of the page that
    they read. The pages that they write are of no count from then on.
    """
    pool = StatePool(runs)
    for sequence in range(runs.sequences):
        stretches, start = pool.stretches(sequence), int(runs.starts[sequence])
        good = bool(stretches) and (start == 0 or pool.count(sequence) == start)
        runs.live[sequence] = good
        for stretch in stretches if good else ():
            pool.set_count(stretch.page, _NO_COUNT)
    return runs.live


def end_states(runs: StateRuns, hidden: torch.Tensor) -> torch.Tensor:
    """Write the counts of all pages that were written, and return `hidden`.

    The rows of sequences that read other states than those before them become NaN in `hidden [rows, H]`,
    which are the run's.
    """
    pool = StatePool(runs)
    for sequence in range(runs.sequences):
        for stretch in pool.stretches(sequence):
            if runs.live[sequence]:
                pool.set_count(stretch.page, stretch.tokens)
            else:
                hidden[stretch.rows] = torch.nan
    return hidden


def _memory_at(runs: StateRuns) -> torch.Tensor:
    """Return the memory that lies `base` floats from `pool`, as far as the run's pages reach."""
    assert runs.base is not None
    count = 1 + max(int(runs.read.max()), int(runs.written.max()), 0)
    size, address = count * runs.pool.stride(0), runs.pool.data_ptr() + 4 * int(runs.base)
    memory = (ctypes.c_char * (4 * size)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32).view(count, -1)
