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

from diptych.engine.backends.triton.packed_step import NO_BLOCK, used_blocks
from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.kv.kv_memory import KVLayout, KVMemory

_ALIGNED = 16
"""Fields begin at multiples of so many bytes; memories lie multiples of so many numbers from the anchor."""


class PromptFields:
    """Fields of up to `tokens` tokens of up to `sequences` sequences, whose tables have `width` blocks."""

    def __init__(
        self, tokens: int, sequences: int, width: int, layout: KVLayout, device: torch.device
    ) -> None:
        """Allocate the fields as padding."""
        sizes: dict[str, tuple[npt.DTypeLike, int]] = {
            "tokens": (np.int64, tokens),
            "positions": (np.int64, tokens),
            "block_ids": (np.int64, tokens),
            "logit_rows": (np.int64, tokens),
            "base": (np.int64, 1),
            "lanes": (np.int32, tokens),
            "starts": (np.int32, sequences),
            "offsets": (np.int32, sequences + 1),
            "tables": (np.int32, sequences * width),  # the last: only its used part is uploaded
        }
        self._width, self._block_size = width, layout.block_size
        self._anchor = KVMemory.on_device(layout, 1, device)
        places, end = {}, 0
        for name, (kind, count) in sizes.items():
            places[name] = slice(end, end + np.dtype(kind).itemsize * count)
            end = -(-places[name].stop // _ALIGNED) * _ALIGNED
        self._tables_begin = places["tables"].start
        self._host_bytes = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device_bytes = torch.zeros(end, dtype=torch.uint8, device=device)
        self._host: dict[str, npt.NDArray[Any]] = {}
        self._device: dict[str, torch.Tensor] = {}
        for name, (kind, _) in sizes.items():
            self._host[name] = self._host_bytes[places[name]].numpy().view(kind)
            type_ = torch.from_numpy(np.empty(0, kind)).dtype
            self._device[name] = self._device_bytes[places[name]].view(type_)
        self._host["block_ids"][:] = NO_BLOCK
        self.upload(0)

    @property
    def anchor(self) -> torch.Tensor:
        """Keys and values `[1, *block_shape]` of a block that is never read or written."""
        return self._anchor.data

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a field on the device: tables `[sequences, width]`, others flat."""
        field = self._device[name]
        return field.view(-1, self._width) if name == "tables" else field

    def fits(self, memory: KVMemory) -> bool:
        """Return whether `memory` can be reached from the anchor, with its layout."""
        data, anchor = memory.data, self.anchor
        return (
            data.dtype == anchor.dtype
            and data.device == anchor.device
            and data.shape[1:] == anchor.shape[1:]
            and data.stride() == anchor.stride()
            and (data.data_ptr() - anchor.data_ptr()) % (_ALIGNED * data.itemsize) == 0
        )

    def fill(self, sequences: Sequence[SequenceStep], abort: AbortWords | None) -> list[slice]:
        """Lay a step over one memory into the host's copy, and return the rows of each sequence."""
        host, spans, begin = self._host, list[slice](), 0
        logit_rows: list[int] = []
        tables = host["tables"].reshape(-1, self._width)
        for number, step in enumerate(sequences):
            span = slice(begin, begin + len(step.token_ids))
            at = np.arange(step.start, step.start + len(step.token_ids))
            used = np.asarray(used_blocks(step), dtype=np.int64)
            host["tokens"][span] = step.token_ids
            host["positions"][span] = step.positions
            aborted = abort is not None and abort.is_aborted(number)
            host["block_ids"][span] = NO_BLOCK if aborted else used[at // self._block_size]
            host["lanes"][span] = at % self._block_size
            host["starts"][number], host["offsets"][number] = step.start, begin
            tables[number, : len(used)] = used
            logit_rows += range(span.stop - step.logit_rows, span.stop)
            spans.append(span)
            begin = span.stop
        for name, padding in (("tokens", 0), ("positions", 0), ("block_ids", NO_BLOCK), ("lanes", 0)):
            host[name][begin:] = padding
        host["starts"][len(sequences) :], host["offsets"][len(sequences) :] = 0, begin
        host["logit_rows"][: len(logit_rows)] = logit_rows
        data, anchor = sequences[0].memory.data, self.anchor
        host["base"][0] = (data.data_ptr() - anchor.data_ptr()) // data.itemsize
        return spans

    def upload(self, sequences: int) -> None:
        """Bring the host's copy to the device, with so many tables, in the order of the current stream."""
        end = self._tables_begin + 4 * sequences * self._width
        self._device_bytes[:end].copy_(self._host_bytes[:end], non_blocking=True)

    def clear(self) -> None:
        """Make padding of all, on the host's copy and on the device."""
        self._host_bytes.zero_()
        self._host["block_ids"][:] = NO_BLOCK
        self.upload(0)
