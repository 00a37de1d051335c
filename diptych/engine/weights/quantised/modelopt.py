"""ModelOpt (NVIDIA's Model Optimizer): FP8 with a scale for each matrix, and one for all of its inputs.

Older exports say so in ``hf_quant_config.json`` alone, newer ones in ``quantization_config`` too. Tensors are
``weight`` (E4M3), ``weight_scale`` and ``input_scale``, a number each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights.quantised.fp8 import Fp8

_ALGORITHMS = ("FP8",)


class ModelOpt(Fp8):
    """Raises UnsupportedModel, naming the field."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        found = str(config.get("quant_algo"))
        if found not in _ALGORITHMS:
            known = ", ".join(_ALGORITHMS)
            raise UnsupportedModel(f"quantization_config.quant_algo {found!r}: of ModelOpt's {known} is read")
        super().__init__({"activation_scheme": "static"})


def own_record(modelopt: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a `quantization_config` of what ``hf_quant_config.json`` says, None where it says nothing.

    Only FP8 is taken from it: anything else, and what makes no sense, is refused by the file's name later.
    """
    said = modelopt.get("quantization")
    if not isinstance(said, dict) or said.get("quant_algo") not in _ALGORITHMS:
        return None
    return {"quant_method": "modelopt", "quant_algo": said["quant_algo"]}
