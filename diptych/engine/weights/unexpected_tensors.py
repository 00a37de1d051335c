"""Tensors that nobody would read. A bias, norm or scale too many, or a layer, is no ornament: its model gives
other numbers than the one that is computed without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from diptych.engine.models.shape import ModelShape, UnsupportedModel
from diptych.engine.weights.canonical import layer_shapes

_NUMBER = re.compile("0|[1-9][0-9]{0,8}")


def refuse_leftovers(
    names: Iterable[str], shape: ModelShape, layer_prefix: str, layer_names: Mapping[str, str]
) -> None:
    """Raises UnsupportedModel for the first of `names` that is not a layer's tensor of a model of `shape`.

    A file says `layer_prefix`, the layer's number, a dot, and what `layer_names` has for the canonical field.
    It goes by the file's names: how many layers the shape counts may be a damaged file's fancy.
    """
    fields = {layer_names[field] for field, _ in layer_shapes(shape)}
    for name in names:
        number, _, field = name.removeprefix(layer_prefix).partition(".")
        layer = int(number) if name.startswith(layer_prefix) and _NUMBER.fullmatch(number) else None
        if layer is None or layer >= shape.num_layers or field not in fields:
            raise UnsupportedModel(f"tensor {name} is not computed: the model's shape has no such tensor")
