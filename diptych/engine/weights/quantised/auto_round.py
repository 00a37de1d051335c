"""AutoRound (Cheng et al. 2023): whole numbers in the tensors of GPTQ or AWQ, under a record of its own.

``packing_format`` says in whose; ``extra_config`` has matrices that are quantised in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights.quantised.awq import Awq
from diptych.engine.weights.quantised.gptq import Gptq
from diptych.engine.weights.quantised.scheme import Scheme

METHODS = ("auto-round", "intel/auto-round")
_SCHEMES: dict[str, type[Gptq | Awq]] = {
    "auto_round:auto_gptq": Gptq,
    "auto_round:gptq": Gptq,
    "auto_round:auto_awq": Awq,
    "auto_round:awq": Awq,
}
_ALIKE = ("bits", "group_size")
_FULL_BITS = 16


def auto_round(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme that reads a folder of AutoRound. Raises UnsupportedModel, naming the field."""
    # The older name came with files of GPTQ alone.
    packing = str(config.get("packing_format") or config.get("backend") or "auto_round:auto_gptq")
    if packing not in _SCHEMES:
        known = ", ".join(_SCHEMES)
        raise UnsupportedModel(f"quantization_config.packing_format {packing!r}: supported are {known}")
    if (kind := config.get("data_type", "int")) != "int":
        raise UnsupportedModel(f"quantization_config.data_type {kind!r}: of AutoRound's int is read")
    for matrix, own in (config.get("extra_config") or {}).items():
        if int(own.get("bits", 0)) >= _FULL_BITS:
            continue  # it lies there as full numbers
        if any(own.get(field, config.get(field)) != config.get(field) for field in _ALIKE):
            raise UnsupportedModel(
                f"quantization_config.extra_config: {matrix} is quantised in another way, and all matrices "
                "must have the same bits and groups"
            )
    fields = {name: config[name] for name in _ALIKE if name in config}
    return _SCHEMES[packing](fields)
