"""Adapters in the reference backend: `s (x Aᵀ) Bᵀ` is added to each product, by groups of rows of one slot.

Each number of a row is a sum over that row alone (a product and a sum along the last axis), never a part of a
matrix product, whose blocking depends on how many rows there are. So a row has the same bits beside any
others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from diptych.engine.adapters.adapter import Adapter, Delta
from diptych.engine.batch import SequenceStep

_ROWS = 32
"""Rows whose products are held at once: 32 rows at rank 64 of an input of 4096 are 32 MiB."""


class StepAdapters:
    """The adapters of one step's rows."""

    def __init__(self, groups: Sequence[tuple[Adapter, torch.Tensor]]) -> None:
        """Take each adapter, and the numbers of its rows."""
        self._groups = groups

    def add(
        self, layer: int, fields: Sequence[str], x: torch.Tensor, out: torch.Tensor, widths: Sequence[int]
    ) -> torch.Tensor:
        """Add the changes of `fields` to `out` `[T, sum of widths]`, in place, and return it.

        `out` is the product of joined matrices with `x` `[T, in]`; `widths` has the columns of each.
        """
        for adapter, rows in self._groups:
            begin = 0
            for field, width in zip(fields, widths, strict=True):
                delta = adapter.layers[layer].get(field)
                if delta is not None:
                    columns = slice(begin, begin + width)
                    changed = out[rows, columns].float() + _change(delta, x[rows].float())
                    out[rows, columns] = changed.to(out.dtype)
                begin += width
        return out

    def of_rows(self, rows: torch.Tensor) -> StepAdapters:
        """Return the adapters of some rows of the step, int64 `[n]`, by their places among these."""
        found = [(adapter, torch.isin(rows, own).nonzero().flatten()) for adapter, own in self._groups]
        return StepAdapters([(adapter, places) for adapter, places in found if len(places)])


class TorchAdapters:
    """The adapters of a backend, by slot, where it computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[int, Adapter] = {}

    def set(self, slot: int, adapter: Adapter | None) -> None:
        """Put an adapter into a slot, or empty it."""
        if adapter is None:
            self._slots.pop(slot, None)
        else:
            layers = tuple(_on_device(layer, self._device) for layer in adapter.layers)
            self._slots[slot] = Adapter(layers)

    def of_step(self, sequences: Sequence[SequenceStep]) -> StepAdapters | None:
        """Return the adapters of a step; None if no row has one."""
        rows: dict[int, list[int]] = {}
        begin = 0
        for step in sequences:
            end = begin + len(step.token_ids)
            if step.adapter is not None:
                rows.setdefault(step.adapter, []).extend(range(begin, end))
            begin = end
        if not rows:
            return None
        return StepAdapters(
            [(self._slots[slot], torch.tensor(ones, device=self._device)) for slot, ones in rows.items()]
        )


def _change(delta: Delta, x: torch.Tensor) -> torch.Tensor:
    """Return what an adapter adds for rows `x` `[rows, in]`, float32 `[rows, out]`."""
    a, b = delta.a.float(), delta.b.float()
    parts = []
    for some in x.split(_ROWS):
        inner = (some.unsqueeze(1) * a).sum(dim=-1) * delta.scale
        parts.append((inner.unsqueeze(1) * b).sum(dim=-1))
    return torch.cat(parts)


def _on_device(layer: Mapping[str, Delta], device: torch.device) -> Mapping[str, Delta]:
    return {field: Delta(one.a.to(device), one.b.to(device), one.scale) for field, one in layer.items()}
