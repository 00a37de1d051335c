"""bitsandbytes: NF4 and FP4 (Dettmers et al. 2023), and LLM.int8() (Dettmers et al. 2022).

Four bits: ``weight``, bytes of whatever type, two numbers a byte with the first one high, each a place in
``weight.quant_map`` `[16]`, times ``weight.absmax`` of its block of numbers in a row. The peaks are mostly
quantised themselves: places in ``weight.nested_quant_map`` `[256]`, times ``weight.nested_absmax`` of their
block, plus an offset. Sizes stand as JSON in ``weight.quant_state.bitsandbytes__nf4``. Eight bits: ``weight``
int8 `[out, in]`, times ``SCB`` `[out]` / 127.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights.canonical import BadModelFile
from diptych.engine.weights.quantised.region import WHOLE_AXIS, Axes, Borders, columns, rows
from diptych.engine.weights.quantised.scheme import Scheme, Tensors, matrix_size
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

    def size(self, matrix: str, tensors: Tensors) -> tuple[int, int]:
        if tensors.has(f"{matrix}.SCB"):
            return matrix_size(f"{matrix}.weight", tensors)
        return _state(matrix, tensors).shape

    def borders(self, matrix: str, tensors: Tensors) -> Borders:
        return (1, 1) if tensors.has(f"{matrix}.SCB") else _state(matrix, tensors).borders

    def read_packed(self, matrix: str, tensors: Tensors) -> PackedMatrix | torch.Tensor:
        """Keep four bits whose blocks are whole parts of a row, and LLM.int8()'s bytes.

        The latter are multiplied with activations that are not rounded, outliers or not.
        """
        if tensors.has(f"{matrix}.SCB"):
            weight, peaks = _checked_bytes(matrix, tensors)
            return weights_only(ScaledMatrix(weight, (peaks / _BYTE_PEAK)[:, None]))
        found = _four_bits(matrix, tensors)
        if found.state.shape[1] % found.state.block:
            return found.numbers()
        codes = torch.stack([found.packed >> 4, found.packed & 15], dim=1).view(found.rows, found.columns)
        scales = found.peaks.view(found.rows, -1)
        kept = pack("table4", codes, scales, found.state.block, table=found.places)
        return found.numbers() if kept is None else kept

    def read(self, matrix: str, tensors: Tensors) -> torch.Tensor:
        if tensors.has(f"{matrix}.SCB"):
            weight, peaks = _checked_bytes(matrix, tensors)
            return weight.float() * (peaks / _BYTE_PEAK)[:, None]
        return _four_bits(matrix, tensors).numbers()


@dataclass(frozen=True)
class _State:
    """Sizes of a matrix of four bits, as its JSON has them."""

    shape: tuple[int, int]
    block: int
    """Numbers that share a peak, one after another in the whole matrix."""
    nested_block: int | None
    """Peaks that share one; None: they are not quantised."""
    nested_offset: float

    @property
    def has_blocks_in_rows(self) -> bool:
        """True if every row is whole blocks, and these whole bytes."""
        return self.shape[1] % self.block == 0 and self.block % 2 == 0

    @property
    def borders(self) -> Borders:
        """Rows and columns at whose multiples blocks and bytes end."""
        if self.has_blocks_in_rows:
            return 1, self.block
        together = math.lcm(self.block, 2)
        unit = together // math.gcd(together, self.shape[1])
        return (unit if self.shape[0] % unit == 0 else self.shape[0]), self.shape[1]

    def lie(self, per: int) -> tuple[tuple[int, int], Axes]:
        """Return how a flat tensor with an entry for `per` numbers lies: the matrix that it is, and its axes.

        Blocks are parts of a row, or of some rows, or of the whole.
        """
        (unit_rows, _), (count, width) = self.borders, self.shape
        if self.has_blocks_in_rows:
            return (count, width // per), (rows(), columns(per))
        many = count // unit_rows
        return (many, -(-unit_rows * width // per)), (rows(unit_rows) if many > 1 else WHOLE_AXIS, WHOLE_AXIS)


@dataclass(frozen=True)
class _FourBits:
    """A matrix of four bits, or some of its rows and columns."""

    rows: int
    columns: int
    packed: torch.Tensor
    """uint8: two codes each, the first one high."""
    places: torch.Tensor
    """float32 `[16]`: the value of each code."""
    peaks: torch.Tensor
    """float32, one a block."""
    state: _State

    def numbers(self) -> torch.Tensor:
        """Return the float32 numbers `[rows, columns]`."""
        count, size = self.rows * self.columns, self.state.block
        of_bytes = torch.cartesian_prod(self.places, self.places)
        numbers = of_bytes.index_select(0, self.packed.int()).flatten()[:count]
        whole = count // size
        numbers[: whole * size].view(whole, size).mul_(self.peaks[:whole, None])
        numbers[whole * size :].mul_(self.peaks[-1])
        return numbers.view(self.rows, self.columns)


def _four_bits(matrix: str, tensors: Tensors) -> _FourBits:
    state = _state(matrix, tensors)
    count, width = state.shape
    # Bytes are also kept as numbers of the type that the rest has (bnb_4bit_quant_storage), for FSDP.
    viewed, axes = state.lie(2)
    try:
        packed = tensors.read(f"{matrix}.weight", *axes, viewed=viewed, as_bytes=True).flatten()
    except BadModelFile as error:
        raise BadModelFile(
            f"weight does not hold {count} times {width} numbers of four bits: {error}"
        ) from error
    places = tensors.read(f"{matrix}.weight.quant_map").float()
    if len(places) != 16:
        raise BadModelFile(f"weight.quant_map has {len(places)} numbers, not one a code")
    held = math.prod(tensors.size(f"{matrix}.weight.absmax"))
    if held != -(-count * width // state.block):
        raise BadModelFile(f"weight.absmax has {held} peaks, not one a block")
    if (region := tensors.region) is not None:
        count, width = len(region.rows), len(region.columns)
    return _FourBits(count, width, packed, places, _peaks(matrix, tensors, state).flatten(), state)


def _checked_bytes(matrix: str, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the int8 numbers of a matrix and the float32 peak of each row."""
    weight = tensors.read(f"{matrix}.weight", rows(), columns())
    peaks = tensors.read(f"{matrix}.SCB", rows()).float()
    if tensors.has(name := f"{matrix}.weight_format") and bool(tensors.read(name).any()):
        raise UnsupportedModel(f"tensor {name}: only rows that lie one after another are read")
    if weight.dtype != torch.int8 or weight.ndim != 2 or peaks.shape != weight.shape[:1]:
        raise BadModelFile(f"weight is {weight.dtype} {tuple(weight.shape)} with {len(peaks)} scales")
    return weight, peaks


def _state(matrix: str, tensors: Tensors) -> _State:
    name = next(f"{matrix}.{name}" for name in _STATES if tensors.has(f"{matrix}.{name}"))
    try:
        state = json.loads(bytes(tensors.read(name).tolist()))
        count, width = map(int, state["shape"])
        nested = int(state["nested_blocksize"]) if "nested_blocksize" in state else None
        offset = float(state.get("nested_offset") or 0.0)
        found = _State((count, width), int(state["blocksize"]), nested, offset)
        if min(count, width, found.block, nested or 1) <= 0 or nested == 0:
            raise ValueError("a size is not positive")
        return found
    except (ValueError, KeyError, TypeError) as error:
        raise BadModelFile(f"tensor {name} is not the state of a matrix: {error!r}") from error


def _peaks(matrix: str, tensors: Tensors, state: _State) -> torch.Tensor:
    """Read float32, one a block."""
    viewed, axes = state.lie(state.block)
    peaks = tensors.read(f"{matrix}.weight.absmax", *axes, viewed=viewed)
    if state.nested_block is None:
        return peaks.float()
    places = tensors.read(f"{matrix}.weight.nested_quant_map").float()
    of_blocks = tensors.read(f"{matrix}.weight.nested_absmax").float()
    count = math.prod(viewed)
    if peaks.dtype != torch.uint8 or len(places) != 256 or len(of_blocks) * state.nested_block < count:
        raise BadModelFile("weight.absmax is not quantised as its state says")
    blocks = torch.arange(count, dtype=torch.int32).view(viewed)
    if (region := tensors.region) is not None:
        blocks = blocks[tuple(map(region.entries, axes))]
    return places[peaks.long()] * of_blocks[blocks // state.nested_block] + state.nested_offset
