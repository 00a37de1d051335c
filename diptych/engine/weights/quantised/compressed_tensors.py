"""compressed-tensors: the folders of llm-compressor (github.com/neuralmagic/compressed-tensors).

Packed whole numbers: ``weight_packed`` int32 `[out, in * bits / 32]`, ``weight_scale`` `[out, groups]`,
``weight_zero_point`` int32 `[out * bits / 32, groups]` where there are zeros (in old folders `[out, groups]`,
not packed, with a sign), ``weight_g_idx`` `[in]` where inputs are ordered, all -1 where they were not.
Whole numbers of eight bits, and FP8: ``weight`` and ``weight_scale``. Whole numbers have a sign, which packed
ones lose to an offset of half their range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights.canonical import BadModelFile
from diptych.engine.weights.quantised.fp8 import kept, read_scaled, rectangle, scaled, static_scale
from diptych.engine.weights.quantised.integer_codes import Codes, fit_blocks, unpacked
from diptych.engine.weights.quantised.region import WHOLE_AXIS, Axis, Borders, columns, rows
from diptych.engine.weights.quantised.scheme import Kept, Scheme, Tensors, matrix_size
from kernels.scaled_matrix import ScaledMatrix

_WORD = 32
_BITS = {"int": (4, 8), "float": (8,)}
_ORDERED = ("group", "dynamic", "true")


class CompressedTensors(Scheme):
    """Raises UnsupportedModel, naming the field."""

    parts = frozenset(
        {
            *("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
            *("input_scale", "input_zero_point"),
        }
    )
    marks = ("weight_scale",)
    packs = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise UnsupportedModel("quantization_config.sparsity_config: sparse weights are not read")
        if config.get("transform_config"):
            raise UnsupportedModel("quantization_config.transform_config: rotated weights are not read")
        weights = _only_kind(config)
        kind, self._bits = str(weights.get("type", "int")), int(weights.get("num_bits", 8))
        if self._bits not in _BITS.get(kind, ()):
            raise UnsupportedModel(
                f"quantization_config.config_groups: {kind} weights of {self._bits} bits are not read"
            )
        self._floats = kind == "float"
        self._group = int(weights.get("group_size") or -1)
        self._rectangle = rectangle(weights.get("block_structure"))
        self._symmetric = bool(weights.get("symmetric", True))
        self._rounds_inputs, self._static = _inputs(config, kind)
        self._ordered = str(weights.get("actorder")).lower() in _ORDERED
        fit = not self._floats and fit_blocks(bits=self._bits, group=self._group)
        self.keeps_codes = fit and not self._ordered

    def size(self, matrix: str, tensors: Tensors) -> tuple[int, int]:
        if not tensors.has(f"{matrix}.weight_packed"):
            return matrix_size(f"{matrix}.weight", tensors)
        sizes = tensors.read(f"{matrix}.weight_shape").flatten()
        if len(sizes) != 2:
            raise BadModelFile(f"tensor {matrix}.weight_shape is no size")
        return int(sizes[0]), int(sizes[1])

    def borders(self, matrix: str, tensors: Tensors) -> Borders:
        if self._floats:
            return self._rectangle or (1, 1)
        group = 1 if self._group <= 0 or self._is_reordered(matrix, tensors) else self._group
        if not tensors.has(f"{matrix}.weight_packed"):
            return 1, group
        return self._of_a_word, math.lcm(self._of_a_word, group)

    def read(self, matrix: str, tensors: Tensors) -> Codes | torch.Tensor:
        if self._floats:
            weight, scales = self._scaled(matrix, tensors)
            return scaled(f"{matrix}.weight", weight, scales, self._rectangle)
        of_groups = self._of_groups(matrix, tensors)
        scales = self._read_by_group(f"{matrix}.weight_scale", tensors, of_groups)
        codes = self._codes(matrix, tensors)
        return Codes(
            codes,
            _of_all(scales),
            _of_all(self._zeros(matrix, tensors, len(codes), scales, of_groups)),
            self._group if self._group > 0 else codes.shape[1],
            self._order(matrix, tensors),
            columns=self.size(matrix, tensors)[1] if self._is_reordered(matrix, tensors) else None,
        )

    @property
    def _of_a_word(self) -> int:
        return _WORD // self._bits

    def _scaled(self, matrix: str, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        return read_scaled(f"{matrix}.weight", f"{matrix}.weight_scale", tensors, self._rectangle)

    def _of_groups(self, matrix: str, tensors: Tensors) -> Axis | None:
        """Return the axis of groups; a column with a group of its own may belong to any."""
        one = self._group <= 0 or self._is_reordered(matrix, tensors)
        return WHOLE_AXIS if one else columns(self._group)

    def _read_by_group(self, name: str, tensors: Tensors, of_groups: Axis | None) -> torch.Tensor:
        """Read numbers `[out, groups]`, or one of a whole matrix."""
        if math.prod(size := tensors.size(name)) == 1:
            return tensors.read(name)
        return tensors.read(name, *(rows(), of_groups)[: len(size)])

    def _is_reordered(self, matrix: str, tensors: Tensors) -> bool:
        name = f"{matrix}.weight_g_idx"
        return self._ordered and tensors.has(name) and not bool((tensors.read(name) < 0).any())

    def read_packed(self, matrix: str, tensors: Tensors) -> Codes | Kept | torch.Tensor:
        """Keep FP8 and int8; their inputs are rounded if the config says so, else multiplied as they are."""
        static = static_scale(matrix, tensors) if self._static else None
        if self._floats:
            weight, scales = self._scaled(matrix, tensors)
            rounds = self._rounds_inputs
            found = kept(f"{matrix}.weight", weight, scales, self._rectangle, static, rounds_inputs=rounds)
            return self.read(matrix, tensors) if found is None else found
        codes = self.read(matrix, tensors)
        one = self._group <= 0 or self._group >= self.size(matrix, tensors)[1]
        if not isinstance(codes, Codes) or not self._rounds_inputs or not one or not self._of_outputs(codes):
            return codes
        values = (codes.codes.int() - self._offset).to(torch.int8)
        scales = codes.scales.float().expand(len(values), 1).contiguous()
        return ScaledMatrix(values, scales, static=static)

    def _of_outputs(self, codes: Codes) -> bool:
        """Return whether codes are bytes with a scale for each output and no zeros."""
        whole = self._bits == 8 and codes.scales.shape[1] == 1 and codes.group_of is None
        return whole and bool((codes.zeros == self._offset).all())

    @property
    def _offset(self) -> int:
        """Return the offset that makes codes without a sign of whole numbers with one."""
        return 1 << self._bits - 1

    def _codes(self, matrix: str, tensors: Tensors) -> torch.Tensor:
        if not tensors.has(name := f"{matrix}.weight_packed"):
            weight = tensors.read(name := f"{matrix}.weight", rows(), columns())
            if weight.dtype != torch.int8 or weight.ndim != 2:
                raise BadModelFile(f"tensor {name} is {weight.dtype} {tuple(weight.shape)}, not int8")
            return (weight.int() + self._offset).to(torch.uint8)
        size, held = self.size(matrix, tensors), matrix_size(name, tensors, (1, self._of_a_word))
        if held[0] != size[0] or not 0 <= held[1] - size[1] < self._of_a_word:
            raise BadModelFile(f"tensor {name} has {held} numbers, not {size}")
        codes = unpacked(tensors.read(name, rows(), columns(self._of_a_word)), self._bits, dim=1)
        own = size[1] if tensors.region is None else len(tensors.region.columns)
        return codes[:, :own].contiguous()

    def _zeros(
        self, matrix: str, tensors: Tensors, count: int, scales: torch.Tensor, of_groups: Axis | None
    ) -> torch.Tensor:
        """Return the zero points as codes `[out, groups]`; they are packed where weights are, along the
        outputs.
        """
        if not tensors.has(name := f"{matrix}.weight_zero_point") and self._symmetric:
            return torch.full_like(scales, self._offset)
        size = tensors.size(name)
        if math.prod(size) == 1 or size == tensors.size(f"{matrix}.weight_scale"):
            return self._read_by_group(name, tensors, of_groups).int() + self._offset
        return unpacked(tensors.read(name, rows(self._of_a_word), of_groups), self._bits, dim=0)[:count]

    def _order(self, matrix: str, tensors: Tensors) -> torch.Tensor | None:
        if not tensors.has(name := f"{matrix}.weight_g_idx"):
            return None
        order = tensors.read(name, columns()).long()
        if bool((order < 0).any()):
            return None
        if not self._ordered:
            raise BadModelFile(f"tensor {name} reorders inputs, which actorder denies")
        return order


def _of_all(numbers: torch.Tensor) -> torch.Tensor:
    """Return a number of a whole matrix as `[1, 1]`; files have no shape, or a shape of ones."""
    return numbers.reshape(1, 1) if numbers.numel() == 1 else numbers


def _inputs(config: Mapping[str, Any], kind: str) -> tuple[bool, bool]:
    """Return whether inputs are rounded to eight bits of `kind`, as weights are, and with a fixed scale."""
    said = [group.get("input_activations") for group in (config.get("config_groups") or {}).values()]
    if not said or any(not one or one != said[0] for one in said):
        return False, False
    first = dict(said[0])
    alike = (first.get("type", "int"), first.get("num_bits", 8), first.get("symmetric", True))
    return alike == (kind, 8, True), not first.get("dynamic", False)


def _only_kind(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how weights are quantised: all of them alike. Raises UnsupportedModel."""
    kinds = [group.get("weights") for group in (config.get("config_groups") or {}).values()]
    if not kinds or not all(kinds):
        raise UnsupportedModel("quantization_config.config_groups: each must say how weights are quantised")
    if any(kind != kinds[0] for kind in kinds):
        raise UnsupportedModel("quantization_config.config_groups: all matrices must be quantised alike")
    return dict(kinds[0])
