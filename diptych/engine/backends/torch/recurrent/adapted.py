"""A recurrent layer with what the adapters of a step's rows change of its products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from diptych.engine.backends.torch.adapters import StepAdapters
from diptych.engine.backends.torch.recurrent.layer import RecurrentLayer, States
from diptych.engine.backends.torch.recurrent.mamba import Mamba
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights.canonical import RECURRENT, layer_shapes

Advance = Callable[[torch.Tensor, States], tuple[torch.Tensor, States]]
"""`RecurrentLayer.advance`."""


class AdaptedRecurrence:
    """See `RecurrentLayer`: a layer as it is, whose products are those of merged matrices in adapted rows."""

    def __init__(self, index: int, shape: ModelShape, layer: RecurrentLayer, adapters: StepAdapters) -> None:
        """Take layer number `index` of a model of `shape`, and the adapters of one step."""
        own = shape.layers[index].recurrent
        assert own is not None
        self._index, self._layer, self._adapters = index, layer, adapters
        sizes = dict(layer_shapes(shape, index))
        self._into = [RECURRENT + name for name in own.into]
        self._widths = [sizes[name][0] for name in self._into]

    def project(self, x_TH: torch.Tensor) -> torch.Tensor:
        """See `RecurrentLayer.project`."""
        out = self._layer.project(x_TH)
        return self._adapters.add(self._index, self._into, x_TH, out, self._widths)

    def of_rows(self, rows: torch.Tensor) -> Advance:
        """Return `RecurrentLayer.advance` for some rows of the step, whose numbers are `rows` `[B, N]`."""
        if not isinstance(self._layer, Mamba):
            return self._layer.advance
        change = partial(self._change, self._adapters.of_rows(rows.flatten()))
        return partial(self._layer.advance, change=change)

    def advance(self, mixed_BNX: torch.Tensor, states: States) -> tuple[torch.Tensor, States]:
        """Refuse to advance rows whose adapters are not known: `of_rows` knows them."""
        raise TypeError("rows with adapters are advanced by their numbers")

    def output(self, mixed_TY: torch.Tensor) -> torch.Tensor:
        """See `RecurrentLayer.output`."""
        out = self._layer.output(mixed_TY)
        return self._adapters.add(self._index, (RECURRENT + "out_proj",), mixed_TY, out, out.shape[1:])

    def _change(self, adapters: StepAdapters, name: str, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return adapters.add(self._index, (RECURRENT + name,), x, out, out.shape[1:])
