"""Adapters on the device: tables that name what lies in each slot, and room for what lies between A and B.

Tables have a fixed place, so that recorded decode steps compute whatever is put into the slots later. They
are made, and rewritten, in the order of the stream: after the steps that were launched before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from diptych.engine.adapters.adapter import Adapter, Delta
from diptych.engine.backends.triton.operators import Operators
from diptych.engine.backends.triton.recurrent.mixers import mixer_kind
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights.canonical import RECURRENT, layer_shapes
from kernels.gpu.change_table import ChangeTable

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "q_gate": ("q_gate",),
    "output": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
"""The products of attention and of a feed-forward, and the matrices that each joins."""


def products_of(shape: ModelShape, layer: int) -> dict[str, tuple[str, ...]]:
    """Return the products of layer number `layer` that can have changes, and the matrices that each joins.

    Those of a recurrence are named as by its kind (recurrent/mixers.py), below `recurrent.`.
    """
    recurrent, sizes = shape.layers[layer].recurrent, dict(layer_shapes(shape, layer))
    products = dict(_FIELDS)
    if recurrent is not None:
        for name, parts in mixer_kind(recurrent).joined(recurrent).items():
            products[RECURRENT + name] = tuple(RECURRENT + matrix for matrix, _ in parts)
    present = {name: tuple(field for field in products[name] if field in sizes) for name in products}
    return {name: fields for name, fields in present.items() if fields}


class PlacedAdapters(Protocol):
    """The adapters that steps of a forward pass can read."""

    def scratch(self, tokens: int) -> torch.Tensor:
        """Return room for what lies between A and B of so many rows, float32."""
        ...

    def set(self, slot: int, prepared: object | None) -> None:
        """Put what a backend prepared into a slot, in the order of the current stream; None empties it."""
        ...


class DeviceAdapters:
    """The adapters of one model, or of one part of it."""

    def __init__(
        self,
        shape: ModelShape,
        operators: Operators,
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Take no memory yet."""
        self._shape, self._operators = shape, operators
        self._slots, self._dtype, self._device = slots, dtype, device
        self._most_ranks = 1 << max(2, (max_rank - 1).bit_length())
        self._tables: list[dict[str, tuple[tuple[str, ...], ChangeTable]]] = []
        products = (products_of(shape, layer) for layer in range(shape.num_layers))
        self._most_joined = max(len(fields) for own in products for fields in own.values())
        self._kept: dict[int, list[torch.Tensor]] = {}

    def scratch(self, tokens: int) -> torch.Tensor:
        """See `PlacedAdapters.scratch`."""
        size = tokens * self._most_joined * self._most_ranks
        return torch.empty(size, dtype=torch.float32, device=self._device)

    def set(self, slot: int, prepared: object | None, copies: dict[int, torch.Tensor] | None = None) -> None:
        """See `PlacedAdapters.set`; what is prepared is an Adapter.

        `copies` are tensors on the device by the ids of those that they were copied from, and get the rest:
        matrices that several changes share are there once.
        """
        assert prepared is None or isinstance(prepared, Adapter)
        if not self._tables:
            self._tables = [self._make_tables(layer) for layer in range(self._shape.num_layers)]
        copies = {} if copies is None else copies
        kept: list[torch.Tensor] = []
        for layer, tables in enumerate(self._tables):
            deltas: Mapping[str, Delta] = {} if prepared is None else prepared.layers[layer]
            for fields, table in tables.values():
                self._write(table, fields, slot, deltas, copies, kept)
        self._kept[slot] = kept

    def add(
        self,
        layer: int,
        product: str,
        x: torch.Tensor,
        out: torch.Tensor,
        slots: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:
        """Add to `out`, a product with `x` `[T, in]`, what the adapters in `slots` (int32 `[T]`) change.

        `scratch` is room for as many rows.
        """
        _, table = self._tables[layer][product]
        self._operators.adapted_linear(x, out, slots, table, scratch, self._most_ranks)

    def _make_tables(self, layer: int) -> dict[str, tuple[tuple[str, ...], ChangeTable]]:
        sizes = dict(layer_shapes(self._shape, layer))
        return {
            product: (fields, self._make_table([sizes[field][0] for field in fields]))
            for product, fields in products_of(self._shape, layer).items()
        }

    def _make_table(self, widths: list[int]) -> ChangeTable:
        def zeros(kind: torch.dtype) -> torch.Tensor:
            return torch.zeros((len(widths), self._slots), dtype=kind, device=self._device)

        begins = [sum(widths[:number]) for number in range(len(widths))]
        return ChangeTable(
            a=zeros(torch.int64),
            b=zeros(torch.int64),
            ranks=zeros(torch.int32),
            scales=zeros(torch.float32),
            begins=torch.tensor(begins, dtype=torch.int32, device=self._device),
            widths=torch.tensor(widths, dtype=torch.int32, device=self._device),
            widest=max(widths),
        )

    def _write(
        self,
        table: ChangeTable,
        fields: Sequence[str],
        slot: int,
        deltas: Mapping[str, Delta],
        copies: dict[int, torch.Tensor],
        kept: list[torch.Tensor],
    ) -> None:
        """Write one slot's column of a table; `kept` gets what it points to, `copies` too."""
        a, b, ranks, scales = [], [], [], []
        for field in fields:
            delta = deltas.get(field)
            moved = [] if delta is None else [self._moved(one, copies) for one in (delta.a, delta.b)]
            kept += moved
            a.append(moved[0].data_ptr() if moved else 0)
            b.append(moved[1].data_ptr() if moved else 0)
            ranks.append(0 if delta is None else delta.rank)
            scales.append(0.0 if delta is None else delta.scale)
        for column, values in ((table.a, a), (table.b, b), (table.ranks, ranks), (table.scales, scales)):
            column[:, slot] = torch.tensor(values, dtype=column.dtype)

    def _moved(self, tensor: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.to(device=self._device, dtype=self._dtype).contiguous()
        return copies[id(tensor)]
