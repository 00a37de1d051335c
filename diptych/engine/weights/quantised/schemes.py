"""Choice of the scheme that reads a folder, by its `quantization_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights.kv_scales import only_the_cache_is_quantised
from diptych.engine.weights.quantised.auto_round import METHODS, auto_round
from diptych.engine.weights.quantised.awq import Awq
from diptych.engine.weights.quantised.bitsandbytes import BitsAndBytes
from diptych.engine.weights.quantised.compressed_tensors import CompressedTensors
from diptych.engine.weights.quantised.fp8 import Fp8
from diptych.engine.weights.quantised.gptq import Gptq
from diptych.engine.weights.quantised.modelopt import ModelOpt, own_record
from diptych.engine.weights.quantised.mxfp4 import Mxfp4
from diptych.engine.weights.quantised.scheme import Scheme

_SCHEMES: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "bitsandbytes": BitsAndBytes,
    "mxfp4": Mxfp4,
    "modelopt": ModelOpt,
    **dict.fromkeys(METHODS, auto_round),
}


def scheme_of(config: Mapping[str, Any], modelopt: Mapping[str, Any] | None = None) -> Scheme | None:
    """Return the scheme of a config's `quantization_config`, or its older name; None for full numbers.

    `modelopt` is what ``hf_quant_config.json`` holds, which stands for a config that says nothing.

    Raises UnsupportedModel, naming the field, for what is not read.
    """
    # compressed-tensors began with the second name.
    key = "quantization_config" if config.get("quantization_config") else "compression_config"
    quantization = config.get(key) or own_record(modelopt or {})
    if not quantization:
        return None
    try:
        return _scheme(quantization)
    except UnsupportedModel:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"{key} makes no sense: {error!r}") from error


def _scheme(quantization: Mapping[str, Any]) -> Scheme | None:
    if only_the_cache_is_quantised(quantization):
        return None
    method = str(quantization.get("quant_method") or _unnamed(quantization))
    if method not in _SCHEMES:
        known = ", ".join(_SCHEMES)
        raise UnsupportedModel(f"quantization_config.quant_method {method!r}: supported are {known}")
    return _SCHEMES[method](quantization)


def _unnamed(quantization: Mapping[str, Any]) -> str | None:
    """Return the method of a config that does not name one: the first of bitsandbytes did not."""
    bits = quantization.get("load_in_4bit") or quantization.get("load_in_8bit")
    return "bitsandbytes" if bits else None
