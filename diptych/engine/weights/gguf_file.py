"""Weights from a GGUF file (the format of llama.cpp), dequantised or in the file's own blocks."""

from __future__ import annotations

from dataclasses import replace
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
from diptych.engine.weights.gguf_shape import ROPE_FACTORS, shape_from_header
from diptych.engine.weights.reader import WHOLE, Cut, OpenCheckpoint, check_columns, cut_from, rows_to_read
from diptych.engine.weights.rows import Rows, rows_of
from diptych.engine.weights.unexpected_tensors import refuse_unexpected_tensors
from kernels.kquants import KQUANT_BYTES
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
        if precision == "packed":  # matrices of several formats are multiplied one after another
            return kept_format(find(name).kind)
        counts = {other: _rows(shape, other) for other in multiplied_together(name)}
        present = {other: count for other, count in counts.items() if count is not None}
        kinds = {find(other).kind for other in present}
        return kept_format(find(name).kind) if kept_together(name, kinds, present.values()) else None

    def part(name: str) -> GgufTensor:
        """Return the tensor, of one of all experts that expert's part."""
        tensor, expert = find(name), place(name).expert
        return tensor if expert is None else _of_expert(tensor, expert)

    def read(name: str, cut: Cut = WHOLE) -> Matrix:
        tensor, stored = part(name), place(name)
        rows = rows_of(stored, name, shape, tensor.shape, interleaved=family.interleaved)
        if cut != WHOLE:
            if precision not in IN_PARTS:
                raise UnsupportedModel(f"tensor {stored.name} is not read in parts in {precision}")
            if stored.make is not None or stored.plus:
                return cut_from(read(name), name, cut)
        if precision not in PLAIN and is_matrix(name) and stored.make is None:
            blocks = None if (kept := kept_as(name)) is None else _blocks(tensor, kept, rows, cut)
            if blocks is not None and (found := blocks_in_precision(blocks, precision)) is not None:
                return found
        if cut != WHOLE:
            return in_precision(name, _read_cut(tensor, rows, cut), precision, float32=stored.float32)
        numbers = dequantised(tensor)
        if rows is not None:
            numbers = numbers[rows]
        if stored.make is not None:
            numbers = stored.make(numbers, name.split(".", 2)[-1], shape)
        if stored.plus:
            numbers = numbers + stored.plus
        return in_precision(name, numbers, precision, float32=bool(stored.plus) or stored.float32)

    own_head = not shape.tied_embeddings or plain_dtype(precision) is None
    return OpenCheckpoint(shape, read, own_head)


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


def _blocks(tensor: GgufTensor, kept: BlockFormat, rows: Rows, cut: Cut) -> BlockMatrix | None:
    """Return a matrix in its blocks, or a part of it; None where the part begins or ends within a block."""
    check_columns(tensor.name, tensor.shape, cut)
    columns = range(tensor.shape[-1]) if cut.columns is None else cut.columns
    count, size = gguf.GGML_QUANT_SIZES[tensor.kind]
    if columns.start % count or (columns.stop % count and columns.stop != tensor.shape[-1]):
        return None
    own, order = rows_to_read(rows, cut)
    data = tensor.data[own, columns.start // count * size : -(-columns.stop // count) * size]
    blocks = torch.from_numpy(np.array(data))
    return BlockMatrix(kept, len(columns), blocks if order is None else blocks[order])


def _read_cut(tensor: GgufTensor, rows: Rows, cut: Cut) -> torch.Tensor:
    """Return the numbers of a part of a matrix; of rows that are cut, only the blocks around it are read."""
    check_columns(tensor.name, tensor.shape, cut)
    own, order = rows_to_read(rows, cut)
    data, shape, first, columns = tensor.data, tensor.shape, 0, cut.columns
    if len(shape) == 1:
        numbers = dequantised(tensor)[own]
    else:
        if columns is not None:
            count, size = gguf.GGML_QUANT_SIZES[tensor.kind]
            begin, end = columns.start // count, -(-columns.stop // count)
            data, first = data[:, begin * size : end * size], begin * count
            shape = (shape[0], (end - begin) * count)
        data = np.ascontiguousarray(data[own])
        numbers = dequantised(replace(tensor, data=data, shape=(len(data), shape[1])))
    if order is not None:
        numbers = numbers[order]
    return numbers if columns is None else numbers[:, columns.start - first : columns.stop - first]


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
