"""The modules of a model that adapters can change, by the names that a file has for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from diptych.engine.adapters.adapter import BadAdapter, Delta, adaptable_fields
from diptych.engine.models.family import Names, Stored, stored_at
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights.canonical import layer_shapes
from diptych.engine.weights.rows import rows_of


@dataclass(frozen=True)
class Module:
    """A matrix of the files; several canonical ones where it is fused."""

    name: str
    layer: int
    parts: Mapping[str, Stored]
    """Canonical fields that its rows hold, in their order, and their places."""
    rows: int
    """Outputs, of all parts."""
    columns: int

    def deltas(
        self, a: torch.Tensor, b: torch.Tensor, scale: float, shape: ModelShape, *, interleaved: bool
    ) -> dict[str, Delta]:
        """Return the change of each canonical matrix, of `a` `[rank, in]` and `b` `[out, rank]` of the file.

        `interleaved` as the family's files are. Raises BadAdapter for tensors of another shape.
        """
        rank = a.shape[0]
        for letter, found, expected in (("A", a, (rank, self.columns)), ("B", b, (self.rows, rank))):
            if tuple(found.shape) != expected:
                raise BadAdapter(f"{self.name}: {letter} is {tuple(found.shape)}, the model needs {expected}")
        made = {}
        for field, stored in self.parts.items():
            name, size = f"layers.{self.layer}.{field}", tuple(b.shape)
            rows = rows_of(stored, name, shape, size, interleaved=interleaved)
            own = b if rows is None else b[rows]
            if stored.make is not None:
                own = stored.make(own.float(), field, shape)
            made[field] = Delta(a.to(own.dtype), own.contiguous(), scale)
        return made


def adaptable_modules(shape: ModelShape, names: Names, prefix: str) -> dict[str, Module]:
    """Return the modules of a model of `shape` that can have changes, by their names in its files.

    `names` and `prefix` are those of the family's layers. Experts, embeddings and the output matrix are not
    among them, nor is anything where attention is over latents.
    """
    modules: dict[str, Module] = {}
    if shape.latent is not None:
        return modules
    for layer in range(shape.num_layers):
        sizes = dict(layer_shapes(shape, layer))
        for field in adaptable_fields(shape, layer):
            stored = stored_at(names, field)
            if stored is None or field not in sizes or stored.stacked:
                continue
            if stored.make is not None and not stored.row_by_row:
                continue
            name = f"{prefix}{layer}.{stored.name.removesuffix('.weight')}"
            rows, columns = sizes[field]
            if name not in modules:
                modules[name] = Module(name, layer, {field: stored}, rows, columns)
            else:
                known = modules[name]
                modules[name] = replace(known, parts={**known.parts, field: stored}, rows=known.rows + rows)
    return modules


def other_modules(shape: ModelShape, names: Names, model_names: Names, prefix: str) -> list[str]:
    """Return the names of all matrices of the files, also of those that can have no change."""
    layers = [
        f"{prefix}{layer}.{stored.name.removesuffix('.weight')}"
        for layer in range(shape.num_layers)
        for field, _ in layer_shapes(shape, layer)
        if (stored := stored_at(names, field)) is not None
    ]
    own = (stored_at(model_names, field) for field in model_names)
    return [*layers, *(stored.name.removesuffix(".weight") for stored in own if stored is not None)]
