"""FP8 (E4M3) weights with a scale for each rectangle of numbers, or one for all of a matrix.

With ``weight_block_size`` (DeepSeek-V3's technical report, Qwen3's FP8 folders) ``weight_scale_inv``
`[out / block, in / block]` is what the numbers are multiplied with, in spite of its name; else
``weight_scale``, a number for all or for each output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights.canonical import BadModelFile
from diptych.engine.weights.quantised.scheme import Scheme, Tensors

_E4M3 = torch.float8_e4m3fn
_SCALES = ("weight_scale_inv", "weight_scale")


class Fp8(Scheme):
    """Raises UnsupportedModel, naming the field."""

    parts = frozenset({*_SCALES, "input_scale", "activation_scale"})
    marks = _SCALES

    def __init__(self, config: Mapping[str, Any]) -> None:
        if (kind := str(config.get("fmt") or "e4m3")) != "e4m3":
            raise UnsupportedModel(f"quantization_config.fmt {kind!r}: e4m3 is read")
        self._block = rectangle(config.get("weight_block_size"))

    def read(self, matrix: str, tensors: Tensors) -> torch.Tensor:
        name = next(f"{matrix}.{name}" for name in _SCALES if tensors.has(f"{matrix}.{name}"))
        return scaled(f"{matrix}.weight", tensors.read(f"{matrix}.weight"), tensors.read(name), self._block)


def rectangle(sizes: Sequence[int] | None) -> tuple[int, int] | None:
    """Rows and columns that have a scale together. Raises ValueError or TypeError for what is none."""
    if not sizes:
        return None
    rows, columns = sizes
    if not isinstance(rows, int) or not isinstance(columns, int) or min(rows, columns) <= 0:
        raise ValueError(f"no rectangle: {sizes!r}")
    return rows, columns


def scaled(
    name: str, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None
) -> torch.Tensor:
    """Float32 numbers of `weight [out, in]` in E4M3 with a scale for all, `[out, 1]` or one for each `block`.

    Raises BadModelFile, naming the tensor.
    """
    if weight.dtype != _E4M3 or weight.ndim != 2:
        raise BadModelFile(f"tensor {name} is {weight.dtype} {tuple(weight.shape)}, not a matrix of E4M3")
    rows, columns = weight.shape
    factors = scale.float().reshape(-1, 1) if scale.ndim < 2 else scale.float()
    if block and scale.ndim == 2:
        expected = -(-rows // block[0]), -(-columns // block[1])
        if tuple(scale.shape) != expected:
            raise BadModelFile(f"tensor {name} has scales {tuple(scale.shape)}, not {expected}")
        numbers = weight.float()
        for number, row in enumerate(factors.repeat_interleave(block[1], 1)[:, :columns]):
            numbers[number * block[0] : (number + 1) * block[0]] *= row
        return numbers
    if tuple(factors.shape) not in ((1, 1), (rows, 1)):
        raise BadModelFile(f"tensor {name} has scales {tuple(scale.shape)} for {rows} outputs")
    return weight.float().mul_(factors)
