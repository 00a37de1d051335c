"""Weights from a GGUF file (the format of llama.cpp), dequantised or in the file's own blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import torch

from diptych.engine.dtype import IN_PARTS, PLAIN, Precision, plain_dtype
from diptych.engine.models.family import GgufFamily, Stored, stored_at
from diptych.engine.models.shape import ModelShape, UnsupportedModel
from diptych.engine.weights.block_quantised import (
    ROUNDED,
    blocks_in_precision,
    in_precision,
    is_matrix,
    kept_format,
    kept_together,
    multiplied_together,
)
from diptych.engine.weights.canonical import BadModelFile, Matrix, layer_shapes
from diptych.engine.weights.gguf_header import GgufHeader, GgufTensor, read_header
from diptych.engine.weights.gguf_parts import all_parts
from diptych.engine.weights.gguf_shape import ROPE_FACTORS, shape_from_header
from diptych.engine.weights.reader import WHOLE, Cut, OpenCheckpoint, check_columns, rows_to_read, source_of
from diptych.engine.weights.rows import Rows, rows_of
from diptych.engine.weights.unexpected_tensors import refuse_unexpected_tensors
from kernels.kquants import KQUANT_BYTES
from kernels.packed_matrix import PackedMatrix, from_blocks
from kernels.quantised_linear import TABLES, BlockFormat, BlockMatrix, dequantise

_ANGLES = ".attn_rot_embd"
"""Part of the names of tensors with the angles of a layer, which old converters left."""
_LAYER_PREFIX = "blk."


def has_quantised_matrices(path: Path) -> bool:
    """Return whether any matrix of the layers is in blocks of fewer than 16 bits a number. Raises
    BadModelFile.
    """
    layers = (tensor for name, tensor in read_header(path).tensors.items() if name.startswith(_LAYER_PREFIX))
    return any(gguf.GGML_QUANT_SIZES[tensor.kind][0] > 1 for tensor in layers)


def has_kept_kquants(path: Path) -> bool:
    """Return whether any matrix of the layers is a K-quant, or has codes in a table. Raises BadModelFile."""
    layers = (tensor for name, tensor in read_header(path).tensors.items() if name.startswith(_LAYER_PREFIX))
    return any(kept_format(tensor.kind) in {*KQUANT_BYTES, *TABLES} for tensor in layers)


def open_gguf(path: Path, precision: Precision) -> OpenCheckpoint:
    """Open a GGUF file. Raises UnsupportedModel (the message names what) or BadModelFile, as its reader
    does.
    """
    if precision in ROUNDED and has_quantised_matrices(path):
        raise UnsupportedModel(f"dtype {precision} rounds full numbers; this file is quantised already")
    header = read_header(path)
    tensors = header.tensors
    factors = {
        name: dequantised(tensors[name]).flatten().tolist() for name in ROPE_FACTORS if name in tensors
    }
    family, shape = shape_from_header(header, factors)
    own = {*_model_names(family, shape), *ROPE_FACTORS}
    behind = _layers_behind(family, header, shape)
    decided = (
        name for name in tensors if name not in own and _ANGLES not in name and not name.startswith(behind)
    )
    refuse_unexpected_tensors(decided, shape, _LAYER_PREFIX, family.layer)

    def place(name: str) -> Stored:
        return _place(family, "embed" if name == "head" and shape.tied_embeddings else name)

    def find(name: str) -> GgufTensor:
        stored = place(name).name
        if stored not in tensors:
            raise BadModelFile(f"tensor {stored} is missing")
        return tensors[stored]

    def kept_as(name: str) -> BlockFormat | None:
        """Return the format of a matrix' blocks, if all that one product joins with it can be kept."""
        counts = {other: _rows(shape, other) for other in multiplied_together(name)}
        present = {other: count for other, count in counts.items() if count is not None}
        kinds = {find(other).kind for other in present}
        return kept_format(find(name).kind) if kept_together(name, kinds, present.values()) else None

    def part(name: str) -> GgufTensor:
        """Return the tensor, of one of all experts that expert's part."""
        tensor, expert = find(name), place(name).expert
        return tensor if expert is None else _of_expert(tensor, expert)

    def stays(name: str, tensor: GgufTensor, rows: Rows, source: Cut) -> Matrix | None:
        """Return a matrix in the file's codes, None where the precision makes full numbers of them."""
        if precision == "packed":
            return _packed_cut(tensor, rows, source)
        if precision in PLAIN or (kept := kept_as(name)) is None:
            return None
        blocks = _blocks(tensor, kept, rows, source)
        return None if blocks is None else blocks_in_precision(blocks, precision)

    def read(name: str, cut: Cut = WHOLE) -> Matrix:
        tensor, stored = part(name), place(name)
        if cut != WHOLE and precision not in IN_PARTS:
            raise UnsupportedModel(f"tensor {stored.name} is not read in parts in {precision}")
        rows = rows_of(stored, name, shape, tensor.shape, interleaved=family.interleaved)
        source = source_of(stored, name, cut, shape)
        if is_matrix(name) and stored.make is None:
            kept = stays(name, tensor, rows, source)
            if kept is not None:
                return kept
        numbers = _read_cut(tensor, rows, source)
        if stored.make is not None:
            numbers = stored.make(numbers, name.split(".", 2)[-1], shape)
        if stored.plus:
            numbers = numbers + stored.plus
        return in_precision(name, numbers, precision, float32=bool(stored.plus) or stored.float32)

    own_head = not shape.tied_embeddings or plain_dtype(precision) is None
    return OpenCheckpoint(shape, read, own_head, files=all_parts(path))


def _layers_behind(family: GgufFamily, header: GgufHeader, shape: ModelShape) -> tuple[str, ...]:
    """Return the beginnings of the names of tensors in layers behind the model's."""
    if family.layers_behind is None:
        return ()
    count = header.metadata.get(f"{family.architecture}.{family.layers_behind}")
    numbers = range(shape.num_layers, shape.num_layers + (count if isinstance(count, int) else 0))
    return tuple(f"{_LAYER_PREFIX}{number}." for number in numbers)


def _model_names(family: GgufFamily, shape: ModelShape) -> set[str]:
    fields = (field for field in family.model if field != "final_norm_bias" or shape.norm_bias)
    return {_place(family, field).name for field in fields}


def _place(family: GgufFamily, name: str) -> Stored:
    """Return the place of a canonical tensor, its whole name in the file."""
    if not name.startswith("layers."):
        stored, prefix = stored_at(family.model, name), ""
    else:
        _, layer, field = name.split(".", 2)
        stored, prefix = stored_at(family.layer, field), f"{_LAYER_PREFIX}{layer}."
    if stored is None:
        raise UnsupportedModel(f"{name}: a {family.architecture} has no such tensor")
    return replace(stored, name=prefix + stored.name)


def _rows(shape: ModelShape, name: str) -> int | None:
    """Return the rows of the canonical matrix, None if a model of `shape` has none of that name."""
    if not name.startswith("layers."):
        return shape.vocab_size
    _, layer, field = name.split(".", 2)
    size = dict(layer_shapes(shape, int(layer))).get(field)
    return None if size is None else size[0]


def _of_expert(tensor: GgufTensor, expert: int) -> GgufTensor:
    """Return one expert's part of a tensor of all experts. Raises BadModelFile."""
    if expert >= tensor.shape[0]:
        raise BadModelFile(f"tensor {tensor.name} has {tensor.shape[0]} experts")
    return replace(tensor, shape=tensor.shape[1:], data=tensor.data[expert])


@dataclass(frozen=True)
class _Covered:
    """The blocks around a part of a tensor, and where it lies in them."""

    tensor: GgufTensor
    order: torch.Tensor | None
    """Rows of `tensor` that are its rows; None: all, as they are."""
    columns: slice | None
    """Columns of `tensor` that are its columns; None: all."""


def _covering(tensor: GgufTensor, rows: Rows, cut: Cut) -> _Covered:
    """Return the part `cut` of a tensor: of rows that are cut, the blocks around it. Copies nothing.

    Raises BadModelFile.
    """
    check_columns(tensor.name, tensor.shape, cut)
    own, order = rows_to_read(rows, cut)
    data, shape, inside = tensor.data[own], tensor.shape, None
    if cut.columns is not None:
        count, size = gguf.GGML_QUANT_SIZES[tensor.kind]
        begin, end = cut.columns.start // count, -(-cut.columns.stop // count)
        data, shape = data[..., begin * size : end * size], (*shape[:-1], (end - begin) * count)
        inside = slice(cut.columns.start - begin * count, cut.columns.stop - begin * count)
        inside = None if inside == slice(0, shape[-1]) else inside
    return _Covered(replace(tensor, data=data, shape=(len(data), *shape[1:])), order, inside)


def _read_cut(tensor: GgufTensor, rows: Rows, cut: Cut) -> torch.Tensor:
    """Return the numbers of a part of a tensor."""
    if len(tensor.shape) == 1:
        own, order = rows_to_read(rows, cut)
        numbers = dequantised(tensor)[own]
        return numbers if order is None else numbers[order]
    found = _covering(tensor, rows, cut)
    numbers = dequantised(replace(found.tensor, data=np.ascontiguousarray(found.tensor.data)))
    numbers = numbers if found.order is None else numbers[found.order]
    return numbers if found.columns is None else numbers[:, found.columns]


def _blocks(tensor: GgufTensor, kept: BlockFormat, rows: Rows, cut: Cut) -> BlockMatrix | None:
    """Return a matrix in its blocks, or a part of it; None where the part begins or ends within a block."""
    found = _covering(tensor, rows, cut)
    if found.columns is not None:
        return None
    blocks = torch.from_numpy(np.array(found.tensor.data))
    order = found.order
    return BlockMatrix(kept, found.tensor.shape[-1], blocks if order is None else blocks[order])


def _packed_cut(tensor: GgufTensor, rows: Rows, cut: Cut) -> PackedMatrix | None:
    """Return a part of a matrix in packed codes; None for a type that has none.

    Raises UnsupportedModel for columns at which codes cannot be cut.
    """
    kind = kept_format(tensor.kind)
    if kind is None:
        return None
    found = _covering(tensor, rows, cut)
    data = torch.from_numpy(np.array(found.tensor.data))
    packed = from_blocks(BlockMatrix(kind, found.tensor.shape[-1], data))
    if packed is not None and found.order is not None:
        packed = packed.rows(found.order)
    if packed is None or found.columns is None:
        return packed
    try:
        return packed.cut(found.columns)
    except ValueError as error:
        raise UnsupportedModel(f"tensor {tensor.name}: {error}") from error


def dequantised(tensor: GgufTensor) -> torch.Tensor:
    """Return the numbers of a tensor in float32. Raises UnsupportedModel for a type that is not read."""
    kept = kept_format(tensor.kind)
    if kept is not None:  # the same numbers, in a tenth of the time
        rows = torch.from_numpy(np.array(tensor.data)).view(-1, tensor.data.shape[-1])
        return dequantise(BlockMatrix(kept, tensor.shape[-1], rows)).view(tensor.shape)
    try:
        values = gguf.quants.dequantize(np.asarray(tensor.data), tensor.kind)
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedModel(f"tensor {tensor.name}: {error}") from error
    # A float32 tensor comes back as a read-only view of the file.
    return torch.from_numpy(np.array(values, dtype=np.float32, copy=not values.flags.writeable))
