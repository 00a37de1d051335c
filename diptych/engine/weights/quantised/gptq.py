"""GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel write it.

``qweight`` int32 `[in * bits / 32, out]`, ``qzeros`` int32 `[groups, out * bits / 32]`, ``scales``
`[groups, out]` and ``g_idx`` int32 `[in]`, the group of each input. The first format of the file keeps zeros
less one, subtracted from whole words: a zero of 0 borrows from its neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights.canonical import BadModelFile
from diptych.engine.weights.quantised.integer_codes import Codes, fit_blocks, unpacked
from diptych.engine.weights.quantised.region import WHOLE_AXIS, Borders, columns, rows
from diptych.engine.weights.quantised.scheme import Scheme, Tensors, matrix_size

_BITS = (2, 4, 8)
_ZERO_LESS_ONE = {"gptq": 1, "gptq_v2": 0}


class Gptq(Scheme):
    """Raises UnsupportedModel, naming the field."""

    parts = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    marks = ("qweight",)
    packs = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._bits = int(config.get("bits", 4))
        if self._bits not in _BITS:
            raise UnsupportedModel(f"quantization_config.bits {self._bits}: of GPTQ's 2, 4 and 8 are read")
        file_format = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
        if file_format not in _ZERO_LESS_ONE:
            known = ", ".join(_ZERO_LESS_ONE)
            raise UnsupportedModel(
                f"quantization_config.checkpoint_format {file_format!r}: supported are {known}"
            )
        # Rules that begin so leave matrices out, which lie there as full numbers then.
        if not all(str(rule).startswith("-:") for rule in config.get("dynamic") or ()):
            raise UnsupportedModel("quantization_config.dynamic: all matrices must have the same bits")
        self._less = _ZERO_LESS_ONE[file_format]
        self._group = int(config.get("group_size") or -1)
        self._ordered = bool(config.get("desc_act", False))
        self.keeps_codes = fit_blocks(bits=self._bits, group=self._group) and not self._ordered

    def size(self, matrix: str, tensors: Tensors) -> tuple[int, int]:
        inputs, outputs = matrix_size(f"{matrix}.qweight", tensors, (self._of_a_word, 1))
        return outputs, inputs

    def borders(self, matrix: str, tensors: Tensors) -> Borders:
        words = self._of_a_word
        if self._group <= 0 or self._is_reordered(matrix, tensors):
            return words, words
        return words, math.lcm(words, self._group)

    @property
    def _of_a_word(self) -> int:
        return 32 // self._bits

    def read(self, matrix: str, tensors: Tensors) -> Codes:
        words, reordered = self._of_a_word, self._is_reordered(matrix, tensors)
        # A column of a matrix with reordered inputs may belong to any group.
        of_groups = columns(self._group) if self._group > 0 and not reordered else WHOLE_AXIS
        codes = unpacked(tensors.read(f"{matrix}.qweight", columns(words), rows()), self._bits, dim=0).T
        ones = sum(self._less << place for place in range(0, 32, self._bits))
        zeros = unpacked(tensors.read(f"{matrix}.qzeros", of_groups, rows(words)) + ones, self._bits, dim=1).T
        group = self._group if self._group > 0 else codes.shape[1]
        return Codes(
            codes.contiguous(),
            tensors.read(f"{matrix}.scales", of_groups, rows()).T,
            zeros,
            group,
            self._order(matrix, tensors),
            columns=self.size(matrix, tensors)[1] if reordered else None,
        )

    def _is_reordered(self, matrix: str, tensors: Tensors) -> bool:
        """Return whether a column's group is not that of its place."""
        if not self._ordered or not tensors.has(name := f"{matrix}.g_idx"):
            return False
        order, group = tensors.read(name), self._group
        return group > 0 and not torch.equal(order, (torch.arange(len(order)) // group).to(order.dtype))

    def _order(self, matrix: str, tensors: Tensors) -> torch.Tensor | None:
        if not tensors.has(name := f"{matrix}.g_idx"):
            return None
        order = tensors.read(name, columns()).long()
        width = self.size(matrix, tensors)[1]
        places = range(width) if tensors.region is None else tensors.region.columns
        group = self._group if self._group > 0 else width
        if torch.equal(order, torch.arange(places.start, places.stop) // group):
            return None
        if not self._ordered:
            raise BadModelFile(f"tensor {name} reorders inputs, which desc_act false denies")
        return order
