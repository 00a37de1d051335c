"""A rank's share of a model for the native step: its parts joined, but for the sums that parts add.

Joined are heads of queries, keys and values, and rows of the vocabulary: what a product gives for each of its
outputs has the same bits beside any others. Output, gate, up and down matrices stay apart, a set a part.
Query heads that share a KV head with another part have it once; a KV head that another rank has, too, is in
both.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import torch

from diptych.engine.backends.native.batch import NativeError
from diptych.engine.backends.native.packing import Packer, native_shape, stored
from diptych.engine.backends.native.supports import supports
from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel.parts import Part
from diptych.engine.parallel.stages import Stage
from diptych.engine.weights import LayerWeights, Matrix, Storage, Weights
from kernels.byte_linear import ByteMatrix
from kernels.cpu import library as native

_T = TypeVar("_T", bound=Matrix)


def supports_in_parts(shape: ModelShape) -> str | None:
    """Return None if the native step computes models of `shape` in parts, or else what it lacks, in words."""
    return next(_lacks(shape), None)


def _lacks(shape: ModelShape) -> Iterator[str]:
    if (why := supports(shape)) is not None:
        yield why
    if shape.experts is not None:
        yield "experts in parts"
    if shape.qk_norm == "width":
        yield "norms over all heads in parts"


@dataclass(frozen=True)
class Share:
    """Parts in a row that rank `rank` of `ranks` computes, and the weights of each."""

    whole: ModelShape
    parts: Sequence[Part]
    weights: Sequence[Weights]
    rank: int
    ranks: int
    stage: Stage
    """Layers that these are the weights of."""
    file: int
    """Descriptor of an empty file in memory that all ranks have; -1 where there is one rank."""

    @property
    def storage(self) -> Storage:
        """Kind of the share's matrices."""
        return self.weights[0].storage

    def view_offset(self, layout: KVLayout) -> int:
        """Return the bytes from the beginning of a block to the first KV head of the share's first layer."""
        head = layout.head_dim * layout.block_size * layout.dtype.itemsize
        return (2 * layout.num_kv_heads * self.stage.layers.start + self.parts[0].kv_heads.start) * head

    def open(self, library: ctypes.CDLL, number: int, instruction_set: bytes | None) -> int:
        """Return a new native model without weights, 0 if it is refused; `number` is that of its dtype."""
        ends = [
            array("i", accumulate(len(part.heads) for part in self.parts)),
            array("i", accumulate(len(part.inner) for part in self.parts)),
            array("i", self._group_ends()),
        ]
        share = native.Share(
            self.ranks,
            self.rank,
            len(self.parts),
            *(each.buffer_info()[0] for each in ends),
            self.whole.num_kv_heads,
            self.whole.vocab_size,
            self.parts[0].vocab.start,
            self.stage.is_first,
            self.stage.is_last,
            self.file,
        )
        made: int | None = library.diptych_share_new(self._native_shape(number), share, instruction_set)
        return made or 0

    def _native_shape(self, number: int) -> native.Shape:
        """Return the shape of the narrower model that these parts are together.

        Where other ranks have parts of its KV heads, not all of these have as many query heads.
        """
        first, last = self.parts[0], self.parts[-1]
        shape = native_shape(self.whole, number)
        shape.layers = len(self.stage.layers)
        shape.heads = last.heads.stop - first.heads.start
        shape.kv_heads = last.kv_heads.stop - first.kv_heads.start
        shape.intermediate = last.inner.stop - first.inner.start
        shape.vocab = last.vocab.stop - first.vocab.start
        return shape

    def pack(self, library: ctypes.CDLL, model: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Set all but rotary tables; return the embedding that must outlive the model, if there is one.

        Raises NativeError if a tensor is not what the shape says.
        """
        packer = Packer(library, model, dtype)
        for index, number in enumerate(self.stage.layers):
            packer.set_layer(index, self.whole.layers[number], self.whole.window(number))
            self._pack_layer(packer, index, [weights.layers[index] for weights in self.weights])
        packer.set_vector(0, native.FINAL_NORM, self.weights[0].final_norm)
        if self.stage.is_last:
            head = _joined([weights.output_matrix() for weights in self.weights])
            packer.set_linear(0, native.HEAD, (head, None))
        if not self.stage.is_first:
            return None
        embedding = stored(_joined([weights.embed for weights in self.weights]), dtype)
        if library.diptych_set_embedding(model, embedding.data_ptr()) != native.OK:
            raise NativeError(native.last_error(library))
        if self.stage.is_last and library.diptych_embed_from_head(model):
            return None
        return embedding

    def _pack_layer(self, packer: Packer, index: int, layers: Sequence[LayerWeights]) -> None:
        with_heads = [layer for layer, new in zip(layers, self._has_new_kv_heads(), strict=True) if new]
        packer.set_linear(
            index,
            native.QKV,
            (_joined([layer.q for layer in layers]), _joined_vectors([layer.q_bias for layer in layers])),
            (
                _joined([layer.k for layer in with_heads]),
                _joined_vectors([layer.k_bias for layer in with_heads]),
            ),
            (
                _joined([layer.v for layer in with_heads]),
                _joined_vectors([layer.v_bias for layer in with_heads]),
            ),
        )
        packer.set_vectors(
            index, replace(layers[0], sinks=_joined_vectors([layer.sinks for layer in layers]))
        )
        for part, layer in enumerate(layers):
            packer.set_part_linear(index, part, native.OUTPUT, (layer.o, layer.o_bias))
            gate_up = ((layer.gate, layer.gate_bias), (layer.up, layer.up_bias))
            packer.set_part_linear(index, part, native.GATE_UP, *gate_up)
            packer.set_part_linear(index, part, native.DOWN, (layer.down, layer.down_bias))

    def _has_new_kv_heads(self) -> list[bool]:
        """Return for each part whether its KV heads are not those of the part before."""
        befores = [None, *(part.kv_heads for part in self.parts[:-1])]
        return [part.kv_heads != before for part, before in zip(self.parts, befores, strict=True)]

    def _group_ends(self) -> Iterator[int]:
        """Yield for each KV head of the share the query heads of it up to the last that reads it."""
        group = self.whole.num_heads // self.whole.num_kv_heads
        heads = range(self.parts[0].heads.start, self.parts[-1].heads.stop)
        for kv_head in range(self.parts[0].kv_heads.start, self.parts[-1].kv_heads.stop):
            yield min((kv_head + 1) * group, heads.stop) - heads.start


def _joined(matrices: Sequence[_T]) -> _T:
    """Return matrices of one kind as one, their rows in order."""
    if len(matrices) == 1:
        return matrices[0]
    if all(isinstance(matrix, torch.Tensor) for matrix in matrices):
        return torch.cat(list(matrices))  # type: ignore[arg-type, return-value]
    if not all(isinstance(matrix, ByteMatrix) for matrix in matrices):
        raise NativeError("matrices of parts are full numbers or bytes")
    values, scales = ([getattr(one, name) for one in matrices] for name in ("values", "scales"))
    return ByteMatrix(torch.cat(values), torch.cat(scales))  # type: ignore[return-value]


def _joined_vectors(vectors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return what all parts have of a vector; None where the shape has none."""
    present = [vector for vector in vectors if vector is not None]
    return torch.cat(present) if present else None
