"""A rank's share of a model for the native step: its parts joined, but for the sums that parts add.

Joined are heads of queries, keys and values, and rows of the vocabulary: what a product gives for each of its
outputs has the same bits beside any others. Output, gate, up and down matrices stay apart, a set a part, and
so do those of experts. Routers are whole.
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

from diptych.engine.backends.native.packing import Packer, native_shape, stored
from diptych.engine.backends.native.status import NativeError
from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.models.shape import ModelShape
from diptych.engine.parallel.parts import Part
from diptych.engine.parallel.stages import Stage
from diptych.engine.weights import LayerWeights, Matrix, Storage, Weights
from kernels.byte_codes import CodedBytes
from kernels.byte_linear import ByteMatrix
from kernels.cpu import library as native

_T = TypeVar("_T", bound=Matrix)


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
        counted = array("i", self._counted_kv_heads())
        share = native.Share(
            self.ranks,
            self.rank,
            len(self.parts),
            *(each.buffer_info()[0] for each in ends),
            self._part_experts(),
            *self._normed_lanes(),
            counted.buffer_info()[0],
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
            packer.set_layer(index, self.whole, number)
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
        packer.set_vectors(index, self._joined_layer_vectors(layers, with_heads))
        if layers[0].experts is not None:
            packer.pack_router(index, layers[0].experts)
        for part, layer in enumerate(layers):
            packer.set_part_linear(index, part, native.OUTPUT, (layer.o, layer.o_bias))
            if layer.experts is not None:
                packer.pack_part_experts(index, part, self._experts(self.parts[part]), layer.experts)
                continue
            gate_up = ((layer.gate, layer.gate_bias), (layer.up, layer.up_bias))
            packer.set_part_linear(index, part, native.GATE_UP, *gate_up)
            packer.set_part_linear(index, part, native.DOWN, (layer.down, layer.down_bias))

    def _joined_layer_vectors(
        self, layers: Sequence[LayerWeights], with_heads: Sequence[LayerWeights]
    ) -> LayerWeights:
        """Return a layer with the vectors of all parts: those of heads joined, the others once."""
        joined = replace(layers[0], sinks=_joined_vectors([layer.sinks for layer in layers]))
        if self.whole.qk_norm != "width":
            return joined
        return replace(
            joined,
            q_norm=_joined_vectors([layer.q_norm for layer in layers]),
            k_norm=_joined_vectors([layer.k_norm for layer in with_heads]),
        )

    def _experts(self, part: Part) -> range:
        """Return the experts that are in `part`, whole or some inner numbers of each."""
        count = 0 if self.whole.experts is None else self.whole.experts.num_experts
        return range(count) if part.experts is None else part.experts

    def _part_experts(self) -> ctypes.Array[native.PartExperts] | None:
        """Return what each part has of experts; None where the model has none."""
        if self.whole.experts is None:
            return None
        own = [(self._experts(part), part) for part in self.parts]
        return (native.PartExperts * len(own))(
            *(
                native.PartExperts(of.start, of.stop, len(part.expert_inner), len(part.shared_inner))
                for of, part in own
            )
        )

    def _normed_lanes(self) -> tuple[int, int]:
        """Return how many numbers of queries and keys are normed together; zeros: each head by itself."""
        if self.whole.qk_norm != "width":
            return 0, 0
        return self.whole.num_heads * self.whole.head_dim, self.whole.num_kv_heads * self.whole.head_dim

    def _counted_kv_heads(self) -> Iterator[int]:
        """Yield for each part first and end of the share's KV heads that no earlier part of the model has."""
        group, before = self.whole.num_heads // self.whole.num_kv_heads, self.parts[0].kv_heads.start
        for part in self.parts:
            new = [head for head in part.kv_heads if head * group >= part.heads.start]
            end = part.kv_heads.stop - before
            yield from (end - len(new), end)

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
    for kind, names in _KINDS:
        if all(isinstance(matrix, kind) for matrix in matrices):
            fields = {name: torch.cat([getattr(one, name) for one in matrices]) for name in names}
            return replace(matrices[0], **fields)  # type: ignore[type-var]
    raise NativeError("matrices of parts are full numbers, bytes or their codes, all of one kind")


_KINDS = ((ByteMatrix, ("values", "scales")), (CodedBytes, ("codes", "slopes", "scales")))
"""Kinds of matrices that are stored row by row, and their tensors."""


def _joined_vectors(vectors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return what all parts have of a vector; None where the shape has none."""
    present = [vector for vector in vectors if vector is not None]
    return torch.cat(present) if present else None
