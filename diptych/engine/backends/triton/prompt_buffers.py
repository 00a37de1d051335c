"""Static input of recorded prompt steps, and the host's copy of it: one copy to the device brings all.

A step of fewer tokens or sequences than it was recorded for has padding: tokens that belong to no sequence
and write nowhere (NO_BLOCK), sequences without tokens. The KV memory is an input as well: its distance from
`anchor`, a block of the same layout that recorded kernels are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from diptych.engine.backends.triton.decode_buffers import BLOCKS, of_table
from diptych.engine.backends.triton.packed_step import NO_BLOCK
from diptych.engine.backends.triton.recurrent.page_fields import PageFields
from diptych.engine.backends.triton.recurrent.step_states import PackedStates
from diptych.engine.backends.triton.step_plan import used_blocks, written_blocks
from diptych.engine.batch import AbortWords, SequenceStep, window_cuts
from diptych.engine.kv.kv_memory import KVLayout, KVMemory

_ALIGNED = 16
"""Fields begin at multiples of so many bytes; memories lie multiples of so many numbers from the anchor."""


STARTS, TABLES = "starts", "tables"
"""Fields that each table of layers has, beside BLOCKS (`of_table`)."""


class PromptFields:
    """Fields of up to `tokens` tokens of up to `sequences` sequences, whose tables have `width` blocks."""

    def __init__(
        self, tokens: int, sequences: int, width: int, layout: KVLayout, device: torch.device
    ) -> None:
        """Allocate the fields as padding."""
        self._block_size, self._widths = layout.block_size, {TABLES: width}
        sizes: dict[str, tuple[npt.DTypeLike, int]] = {
            "tokens": (np.int64, tokens),
            "positions": (np.int64, tokens),
            BLOCKS: (np.int64, tokens),
            "logit_rows": (np.int64, tokens),
            "base": (np.int64, 1),
            "lanes": (np.int32, tokens),
            STARTS: (np.int32, sequences),
            "offsets": (np.int32, sequences + 1),
        }
        self._pages: PageFields | None = None
        windows = layout.windows
        if layout.states is not None:
            self._pages, windows = PageFields(tokens, sequences, layout.block_size, layout.states), None
            sizes |= self._pages.sizes()
        for table in range(1, 1 if windows is None else 1 + windows.tables):
            assert windows is not None
            columns = min(width, windows.span(tokens, layout.block_size))
            self._widths[of_table(TABLES, table)] = columns
            sizes[of_table(BLOCKS, table)] = (np.int64, tokens)
            sizes[of_table(STARTS, table)] = (np.int32, sequences)
            sizes[of_table(TABLES, table)] = (np.int32, sequences * columns)
        sizes[TABLES] = (np.int32, sequences * width)  # the last: only its used part is uploaded
        self._blocks = [of_table(BLOCKS, table) for table in range(len(self._widths))]
        self._anchor = KVMemory.on_device(layout, 1, device)
        places, end = {}, 0
        for name, (kind, count) in sizes.items():
            places[name] = slice(end, end + np.dtype(kind).itemsize * count)
            end = -(-places[name].stop // _ALIGNED) * _ALIGNED
        self._tables_begin = places[TABLES].start
        self._host_bytes = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device_bytes = torch.zeros(end, dtype=torch.uint8, device=device)
        self._host: dict[str, npt.NDArray[Any]] = {}
        self._device: dict[str, torch.Tensor] = {}
        for name, (kind, _) in sizes.items():
            self._host[name] = self._host_bytes[places[name]].numpy().view(kind)
            type_ = torch.from_numpy(np.empty(0, kind)).dtype
            self._device[name] = self._device_bytes[places[name]].view(type_)
        self.clear()

    @property
    def anchor(self) -> torch.Tensor:
        """Keys and values `[1, *block_shape]` of a block that is never read or written."""
        return self._anchor.data

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a field on the device: tables `[sequences, width]`, others flat."""
        field = self._device[name]
        return field.view(-1, self._widths[name]) if name in self._widths else field

    @property
    def written(self) -> list[torch.Tensor]:
        """Return where tokens are written, int64 `[tokens]` on the device, by table."""
        return [self._device[name] for name in self._blocks]

    def states(self, tokens: int, sequences: int) -> PackedStates | None:
        """Return the recurrent states of a step of so many tokens and sequences; None without any."""
        if self._pages is None:
            return None
        return self._pages.states(self._device.__getitem__, tokens, sequences, self._anchor)

    def fits(self, memory: KVMemory) -> bool:
        """Return whether `memory` can be reached from the anchor, with its layout."""
        data, anchor = memory.data, self.anchor
        return (
            memory.layout.windows == self._anchor.layout.windows
            and data.dtype == anchor.dtype
            and data.device == anchor.device
            and data.shape[1:] == anchor.shape[1:]
            and data.stride() == anchor.stride()
            and (data.data_ptr() - anchor.data_ptr()) % (_ALIGNED * data.itemsize) == 0
        )

    def fill(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> list[slice]:
        """Lay a step over one memory into the host's copy, and return the rows of each sequence."""
        host, spans, begin = self._host, list[slice](), 0
        logit_rows: list[int] = []
        every = list(zip(*(sequences, *window_cuts(sequences)), strict=True))
        for number, step in enumerate(sequences):
            span = slice(begin, begin + len(step.token_ids))
            at = np.arange(step.start, step.start + len(step.token_ids))
            host["tokens"][span] = step.token_ids
            host["positions"][span] = step.positions
            host["lanes"][span] = at % self._block_size
            host["offsets"][number] = begin
            aborted = abort is not None and abort.is_aborted(number)
            for table, seen in enumerate(every[number]):
                self._fill_table(table, number, seen, span, aborted=aborted)
            logit_rows += range(span.stop - step.logit_rows, span.stop)
            spans.append(span)
            begin = span.stop
        for name in ("tokens", "positions", "lanes"):
            host[name][begin:] = 0
        for table, name in enumerate(self._blocks):
            host[name][begin:] = NO_BLOCK
            host[of_table(STARTS, table)][len(sequences) :] = 0
        host["offsets"][len(sequences) :] = begin
        host["logit_rows"][: len(logit_rows)] = logit_rows
        if self._pages is not None:
            self._pages.fill(host, sequences, abort, self._anchor)
        data, anchor = sequences[0].memory.data, self.anchor
        host["base"][0] = (data.data_ptr() - anchor.data_ptr()) // data.itemsize
        return spans

    def _fill_table(self, table: int, number: int, step: SequenceStep, span: slice, *, aborted: bool) -> None:
        """Lay into the host's copy where keys and values of sequence `number`, with rows `span`, lie, for the
        layers of one table.
        """
        host, name = self._host, of_table(TABLES, table)
        used = used_blocks(step)
        host[name].reshape(-1, self._widths[name])[number, : len(used)] = used
        host[of_table(STARTS, table)][number] = step.start
        host[of_table(BLOCKS, table)][span] = written_blocks(step, aborted=aborted)

    def upload(self, sequences: int) -> None:
        """Bring the host's copy to the device, with so many tables, in the order of the current stream."""
        end = self._tables_begin + 4 * sequences * self._widths[TABLES]
        self._device_bytes[:end].copy_(self._host_bytes[:end], non_blocking=True)

    def clear(self) -> None:
        """Make padding of all, on the host's copy and on the device."""
        self._host_bytes.zero_()
        for name in self._blocks:
            self._host[name][:] = NO_BLOCK
        if self._pages is not None:
            self._pages.clear(self._host)
        self.upload(0)
