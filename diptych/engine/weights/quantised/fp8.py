"""FP8 (E4M3) weights with a scale for each rectangle of numbers, or one for all of a matrix.

With ``weight_block_size`` (DeepSeek-V3's technical report, Qwen3's FP8 folders) ``weight_scale_inv``
`[out / block, in / block]` is what the numbers are multiplied with, in spite of its name; else
``weight_scale``, a number for all or for each output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights.canonical import BadModelFile
from diptych.engine.weights.quantised.region import WHOLE_AXIS, Axes, Borders, columns, rows
from diptych.engine.weights.quantised.scheme import Kept, Scheme, Tensors, matrix_size
from kernels.packed_matrix import pack
from kernels.scaled_matrix import SQUARE, ScaledMatrix, weights_only

_E4M3 = torch.float8_e4m3fn
_SCALES = ("weight_scale_inv", "weight_scale")


class Fp8(Scheme):
    """Raises UnsupportedModel, naming the field."""

    parts = frozenset({*_SCALES, "input_scale", "activation_scale"})
    marks = _SCALES
    packs = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        if (kind := str(config.get("fmt") or "e4m3")) != "e4m3":
            raise UnsupportedModel(f"quantization_config.fmt {kind!r}: e4m3 is read")
        self._block = rectangle(config.get("weight_block_size"))
        self._static = config.get("activation_scheme") == "static"

    def size(self, matrix: str, tensors: Tensors) -> tuple[int, int]:
        return matrix_size(f"{matrix}.weight", tensors)

    def borders(self, matrix: str, tensors: Tensors) -> Borders:
        return self._block or (1, 1)

    def read(self, matrix: str, tensors: Tensors) -> torch.Tensor:
        return scaled(f"{matrix}.weight", *self._parts(matrix, tensors), self._block)

    def read_packed(self, matrix: str, tensors: Tensors) -> Kept | torch.Tensor:
        weight, scale = self._parts(matrix, tensors)
        static = static_scale(matrix, tensors) if self._static else None
        found = kept(f"{matrix}.weight", weight, scale, self._block, static)
        return self.read(matrix, tensors) if found is None else found

    def _parts(self, matrix: str, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        name = next(f"{matrix}.{name}" for name in _SCALES if tensors.has(f"{matrix}.{name}"))
        return read_scaled(f"{matrix}.weight", name, tensors, self._block)


def read_scaled(
    weight: str, scale: str, tensors: Tensors, block: tuple[int, int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a matrix and its scales: one for all, for each output, or for each `block`."""
    return tensors.read(weight, rows(), columns()), tensors.read(scale, *_scale_axes(scale, tensors, block))


def _scale_axes(scale: str, tensors: Tensors, block: tuple[int, int] | None) -> Axes:
    size = tensors.size(scale)
    if block and len(size) == 2:
        return rows(block[0]), columns(block[1])
    return (rows() if math.prod(size) > 1 else WHOLE_AXIS,) if size else ()


def static_scale(matrix: str, tensors: Tensors) -> torch.Tensor | None:
    """Return the scale of all inputs of a matrix, float32 `[1]`; None where the file has none.

    Raises BadModelFile for one that is no positive number.
    """
    if not tensors.has(name := f"{matrix}.input_scale"):
        return None
    scale = tensors.read(name).float().flatten()
    if scale.numel() != 1 or not bool(scale.isfinite() & (scale > 0)):
        raise BadModelFile(f"tensor {name} is not a positive number")
    return scale


def kept(
    name: str,
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int] | None,
    static: torch.Tensor | None,
    *,
    rounds_inputs: bool = True,
) -> Kept | None:
    """Return `weight [out, in]` in E4M3 as a GPU step multiplies it; None for rectangles that it does not.

    Inputs are rounded where the folder `rounds_inputs` and scales belong to outputs or to squares of 128.
    Raises BadModelFile as `scaled` does.
    """
    check_shapes(name, weight, scale, block)
    rows = weight.shape[0]
    factors = scale.float()
    if block and scale.ndim == 2:
        if block == (SQUARE, SQUARE):
            found = ScaledMatrix(weight, factors, squares=True)
            return found if rounds_inputs else weights_only(found)
        of_rows = factors.repeat_interleave(block[0], 0)[:rows]
        return pack("fp8", weight.view(torch.uint8), of_rows, block[1])
    of_outputs = factors.reshape(-1, 1).expand(rows, 1).contiguous()
    found = ScaledMatrix(weight, of_outputs, static=static)
    return found if rounds_inputs else weights_only(found)


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
    check_shapes(name, weight, scale, block)
    columns = weight.shape[1]
    factors = scale.float().reshape(-1, 1) if scale.ndim < 2 else scale.float()
    if block and scale.ndim == 2:
        numbers = weight.float()
        for number, row in enumerate(factors.repeat_interleave(block[1], 1)[:, :columns]):
            numbers[number * block[0] : (number + 1) * block[0]] *= row
        return numbers
    return weight.float().mul_(factors)


def check_shapes(name: str, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None) -> None:
    """Raise BadModelFile, naming the tensor, for what is no E4M3 or has scales of another shape."""
    if weight.dtype != _E4M3 or weight.ndim != 2:
        raise BadModelFile(f"tensor {name} is {weight.dtype} {tuple(weight.shape)}, not a matrix of E4M3")
    rows, columns = weight.shape
    if block and scale.ndim == 2:
        expected = -(-rows // block[0]), -(-columns // block[1])
        if tuple(scale.shape) != expected:
            raise BadModelFile(f"tensor {name} has scales {tuple(scale.shape)}, not {expected}")
        return
    shape = (scale.numel(), 1) if scale.ndim < 2 else tuple(scale.shape)
    if shape not in ((1, 1), (rows, 1)):
        raise BadModelFile(f"tensor {name} has scales {tuple(scale.shape)} for {rows} outputs")
