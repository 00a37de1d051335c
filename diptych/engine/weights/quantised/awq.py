"""AWQ (Lin et al. 2023) in AutoAWQ's GEMM layout.

``qweight`` int32 `[in, out / 8]`, ``qzeros`` int32 `[groups, out / 8]`, ``scales`` `[groups, out]`: eight
outputs in a word, in an order of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights.quantised.integer_codes import Codes, fit_blocks, unpacked
from diptych.engine.weights.quantised.region import WHOLE_AXIS, Borders, columns, rows
from diptych.engine.weights.quantised.scheme import Scheme, Tensors, matrix_size

_BITS = 4
_OF_A_WORD = 8
_PLACE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word, from its lowest bits on, of each of its eight outputs."""


class Awq(Scheme):
    """Raises UnsupportedModel, naming the field."""

    parts = frozenset({"qweight", "qzeros", "scales"})
    marks = ("qweight",)
    packs = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        bits = int(config.get("bits") or config.get("w_bit") or _BITS)
        if bits != _BITS:
            raise UnsupportedModel(f"quantization_config.bits {bits}: of AWQ's 4 are read")
        # The last two names are GPTQModel's, and transformers' since it took them over.
        names = (config.get(key) for key in ("version", "checkpoint_format", "format"))
        if (layout := str(next(filter(None, names), "gemm")).lower()) != "gemm":
            raise UnsupportedModel(f"quantization_config.version {layout!r}: of AWQ's layouts gemm is read")
        if not config.get("zero_point", True):
            raise UnsupportedModel("quantization_config.zero_point false: AWQ without zeros is not read")
        self._group = int(config.get("group_size") or config.get("q_group_size") or -1)
        self.keeps_codes = fit_blocks(bits=bits, group=self._group)

    def size(self, matrix: str, tensors: Tensors) -> tuple[int, int]:
        inputs, outputs = matrix_size(f"{matrix}.qweight", tensors, (1, _OF_A_WORD))
        return outputs, inputs

    def borders(self, matrix: str, tensors: Tensors) -> Borders:
        return _OF_A_WORD, max(self._group, 1)

    def read(self, matrix: str, tensors: Tensors) -> Codes:
        of_groups = columns(self._group) if self._group > 0 else WHOLE_AXIS
        codes = _in_order(tensors.read(f"{matrix}.qweight", columns(), rows(_OF_A_WORD))).T.contiguous()
        zeros = _in_order(tensors.read(f"{matrix}.qzeros", of_groups, rows(_OF_A_WORD))).T
        scales = tensors.read(f"{matrix}.scales", of_groups, rows()).T
        return Codes(codes, scales, zeros, self._group if self._group > 0 else codes.shape[1])


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """`[rows, out / 8]` words to uint8 `[rows, out]`."""
    lying = unpacked(words, _BITS, dim=1).view(len(words), -1, _OF_A_WORD)
    return lying[..., list(_PLACE_OF_OUTPUT)].flatten(1)
