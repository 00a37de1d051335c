"""bitsandbytes: NF4 and FP4 (Dettmers et al. 2023), and LLM.int8() (Dettmers et al. 2022).

Four bits: ``weight``, bytes of whatever type, two numbers a byte with the first one high, each a place in
``weight.quant_map`` `[16]`, times ``weight.absmax`` of its block of numbers in a row. The peaks are mostly
quantised themselves: places in ``weight.nested_quant_map`` `[256]`, times ``weight.nested_absmax`` of their
block, plus an offset. Sizes stand as JSON in ``weight.quant_state.bitsandbytes__nf4``. Eight bits: ``weight``
int8 `[out, in]`, times ``SCB`` `[out]` / 127.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights.canonical import BadModelFile
from diptych.engine.weights.quantised.scheme import Scheme, Tensors
from kernels.packed_matrix import PackedMatrix, pack
from kernels.scaled_matrix import ScaledMatrix, weights_only

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_BYTE_PEAK = 127.0


class BitsAndBytes(Scheme):
    """Raises UnsupportedModel, naming the field."""

    parts = frozenset(
        {
            *_STATES,
            *("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
            *("SCB", "weight_format"),
        }
    )
    marks = ("SCB", *_STATES)
    packs = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        if not config.get("load_in_4bit") and not config.get("load_in_8bit"):
            raise UnsupportedModel("quantization_config: neither load_in_4bit nor load_in_8bit")

    def read_packed(self, matrix: str, tensors: Tensors) -> PackedMatrix | torch.Tensor:
        """Keep four bits whose blocks are whole parts of a row, and LLM.int8()'s bytes.

        The latter are multiplied with activations that are not rounded, outliers or not.
        """
        if tensors.has(f"{matrix}.SCB"):
            weight, peaks = _checked_bytes(matrix, tensors)
            return weights_only(ScaledMatrix(weight, (peaks / _BYTE_PEAK)[:, None]))
        packed, places, peaks, state = _four_bits(matrix, tensors)
        (rows, columns), size = state["shape"], state["blocksize"]
        if columns % size:
            return self.read(matrix, tensors)
        codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten()[: rows * columns]
        scales = peaks.view(rows, -1)
        found = pack("table4", codes.view(rows, columns), scales, size, table=places)
        return self.read(matrix, tensors) if found is None else found

    def read(self, matrix: str, tensors: Tensors) -> torch.Tensor:
        if tensors.has(f"{matrix}.SCB"):
            weight, peaks = _checked_bytes(matrix, tensors)
            return weight.float() * (peaks / _BYTE_PEAK)[:, None]
        packed, places, peaks, state = _four_bits(matrix, tensors)
        (rows, columns), size = state["shape"], state["blocksize"]
        count = rows * columns
        of_bytes = torch.cartesian_prod(places, places)
        numbers = of_bytes.index_select(0, packed.int()).flatten()[:count]
        whole = count // size
        numbers[: whole * size].view(whole, size).mul_(peaks[:whole, None])
        numbers[whole * size :].mul_(peaks[-1])
        return numbers.view(rows, columns)


def _four_bits(
    matrix: str, tensors: Tensors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Mapping[str, Any]]:
    """Return the bytes of a matrix, the value of each code, the peak of each block, and the state."""
    state = _state(matrix, tensors)
    (rows, columns), size = state["shape"], state["blocksize"]
    count = rows * columns
    # Bytes are also kept as numbers of the type that the rest has (bnb_4bit_quant_storage), for FSDP.
    packed = tensors.read(f"{matrix}.weight").flatten().view(torch.uint8)
    places = tensors.read(f"{matrix}.weight.quant_map").float()
    if len(places) != 16 or len(packed) * 2 < count:
        raise BadModelFile(f"weight does not hold {rows} times {columns} numbers of four bits")
    peaks = _peaks(matrix, tensors, state)
    if len(peaks) != -(-count // size):
        raise BadModelFile(f"weight.absmax has {len(peaks)} peaks, not one a block")
    return packed, places, peaks, state


def _checked_bytes(matrix: str, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the int8 numbers of a matrix and the float32 peak of each row."""
    weight, peaks = tensors.read(f"{matrix}.weight"), tensors.read(f"{matrix}.SCB").float()
    if tensors.has(name := f"{matrix}.weight_format") and bool(tensors.read(name).any()):
        raise UnsupportedModel(f"tensor {name}: only rows that lie one after another are read")
    if weight.dtype != torch.int8 or weight.ndim != 2 or peaks.shape != weight.shape[:1]:
        raise BadModelFile(f"weight is {weight.dtype} {tuple(weight.shape)} with {len(peaks)} scales")
    return weight, peaks


def _state(matrix: str, tensors: Tensors) -> Mapping[str, Any]:
    name = next(f"{matrix}.{name}" for name in _STATES if tensors.has(f"{matrix}.{name}"))
    try:
        state = json.loads(bytes(tensors.read(name).tolist()))
        rows, columns = map(int, state["shape"])
        blocks = {key: int(state[key]) for key in ("blocksize", "nested_blocksize") if key in state}
        if min(rows, columns, blocks["blocksize"], *blocks.values()) <= 0:
            raise ValueError("a size is not positive")
        offset = float(state.get("nested_offset") or 0.0)
        return {"shape": (rows, columns), **blocks, "nested_offset": offset}
    except (ValueError, KeyError, TypeError) as error:
        raise BadModelFile(f"tensor {name} is not the state of a matrix: {error!r}") from error


def _peaks(matrix: str, tensors: Tensors, state: Mapping[str, Any]) -> torch.Tensor:
    """Float32, one a block."""
    peaks = tensors.read(f"{matrix}.weight.absmax")
    if "nested_blocksize" not in state:
        return peaks.float()
    places = tensors.read(f"{matrix}.weight.nested_quant_map").float()
    of_blocks = tensors.read(f"{matrix}.weight.nested_absmax").float()
    of_each = of_blocks.repeat_interleave(state["nested_blocksize"])[: len(peaks)]
    if peaks.dtype != torch.uint8 or len(places) != 256 or len(of_each) != len(peaks):
        raise BadModelFile("weight.absmax is not quantised as its state says")
    offset: float = state["nested_offset"]
    return places[peaks.long()] * of_each + offset
