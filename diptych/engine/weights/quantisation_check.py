"""Refuses a Hugging Face folder whose weights are quantised in a way that its config does not say, or that
nobody here reads: taken as they lie, without their scales, they would be other numbers. Scales of the KV
cache are no weights (kv_scales.py).

Older exports of ModelOpt describe themselves in `hf_quant_config.json` alone, and others not at all. So the
tensors are looked at too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights.kv_scales import is_kv_scale
from diptych.engine.weights.quantised import Scheme, Tensors

_FULL = frozenset({"F64", "F32", "F16", "BF16"})
"""Types of safetensors files that are numbers by themselves."""
_COUNTS = frozenset({"I64", "BOOL"})
"""Positions and masks: no weights, quantised or not."""
_QUANTISED_NAMES = ("_scale", "_scale_inv", ".qweight")


def refuse_quantised(
    modelopt: Mapping[str, Any], dtypes: Mapping[str, str], scheme: Scheme | None, tensors: Tensors
) -> None:
    """Raises UnsupportedModel, naming the key or tensor that says so.

    `modelopt` is what hf_quant_config.json holds, empty where there is none; `dtypes` the type of each tensor
    by name; `scheme` what the config means.
    """
    if modelopt and not _only_the_cache(modelopt.get("quantization")):
        raise UnsupportedModel("hf_quant_config.json: what ModelOpt quantised is not read")
    for name, dtype in dtypes.items():
        if scheme is not None and (scheme.matrix_of(name) or scheme.is_quantised(_matrix(name), tensors)):
            continue
        if dtype not in _FULL | _COUNTS or (name.endswith(_QUANTISED_NAMES) and not is_kv_scale(name)):
            raise UnsupportedModel(f"tensor {name} ({dtype}): the config does not say how it is quantised")


def _matrix(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _only_the_cache(quantization: object) -> bool:
    """Whether ModelOpt's own record speaks of the KV cache alone."""
    if not isinstance(quantization, dict):
        return False
    return bool(quantization.get("kv_cache_quant_algo")) and not quantization.get("quant_algo")
