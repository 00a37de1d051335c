"""Refusal of tensors that would not be read, or not as what they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from diptych.engine.models.family import Names, stored_at
from diptych.engine.models.shape import LayerShape, ModelShape, UnsupportedModel
from diptych.engine.weights.canonical import layer_shapes
from diptych.engine.weights.kv_scales import is_kv_scale
from diptych.engine.weights.quantised import HeldTensors, Scheme

_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
_FULL = frozenset({"F64", "F32", "F16", "BF16"})
"""Types of safetensors files that are numbers by themselves."""
_COUNTS = frozenset({"I64", "BOOL"})
"""Positions and masks: no weights, quantised or not."""
_QUANTISED_NAMES = ("_scale", "_scale_inv", ".qweight")


def refuse_unexpected_tensors(
    names: Iterable[str], shape: ModelShape, layer_prefix: str, layer_names: Names
) -> None:
    """Raise UnsupportedModel for the first of `names` that is not a layer's tensor of a model of `shape`.

    A bias, norm, scale or layer too many is no ornament: its model gives other numbers than one that is
    computed without it. A file says `layer_prefix`, the layer's number, a dot, and what `layer_names` has for
    the canonical field. The file's names decide: how many layers the shape counts may come from a damaged
    file.
    """
    known: dict[LayerShape, frozenset[str]] = {}
    for name in names:
        number, _, field = name.removeprefix(layer_prefix).partition(".")
        layer = int(number) if name.startswith(layer_prefix) and _NUMBER.fullmatch(number) else None
        if layer is not None and layer < shape.num_layers:
            of = shape.layers[layer]
            if of not in known:
                places = (stored_at(layer_names, wanted) for wanted, _ in layer_shapes(shape, layer))
                known[of] = frozenset(place.name for place in places if place is not None)
            if field in known[of]:
                continue
        raise UnsupportedModel(f"tensor {name} is not computed: the model's shape has no such tensor")


def refuse_quantised(
    modelopt: Mapping[str, Any], dtypes: Mapping[str, str], scheme: Scheme | None, tensors: HeldTensors
) -> None:
    """Raise UnsupportedModel, naming the key or tensor, for weights whose quantisation the config leaves out.

    Taken without their scales they would be other numbers. Older exports of ModelOpt describe themselves in
    `hf_quant_config.json` alone, and others not at all, so the tensors are looked at too. Scales of the KV
    cache are no weights (kv_scales.py). `modelopt` is what hf_quant_config.json holds, empty where there is
    none; `dtypes` the type of each tensor by name; `scheme` what the config means.
    """
    is_read = scheme is not None and "F8_E4M3" in dtypes.values()
    if modelopt and not is_read and not _only_the_cache(modelopt.get("quantization")):
        raise UnsupportedModel("hf_quant_config.json: what ModelOpt quantised is not read")
    for name, dtype in dtypes.items():
        if scheme is not None and (scheme.matrix_of(name) or scheme.is_quantised(_matrix(name), tensors)):
            continue
        if dtype not in _FULL | _COUNTS or (name.endswith(_QUANTISED_NAMES) and not is_kv_scale(name)):
            raise UnsupportedModel(f"tensor {name} ({dtype}): the config does not say how it is quantised")


def _matrix(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _only_the_cache(quantization: object) -> bool:
    """Return whether ModelOpt's own record is about the KV cache alone."""
    if not isinstance(quantization, dict):
        return False
    return bool(quantization.get("kv_cache_quant_algo")) and not quantization.get("quant_algo")
