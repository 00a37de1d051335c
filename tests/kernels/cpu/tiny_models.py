"""Random decoders of odd sizes, and steps over random block tables, for the tests of the native step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.models.shape import LayerShape, ModelShape, Rotation
from diptych.engine.weights import ExpertWeights, LayerWeights, Weights
from diptych.engine.weights.canonical import layer_shapes, layer_weights
from kernels.byte_codes import code_matrix
from kernels.byte_linear import quantise_matrix
from kernels.cpu import library as native
from kernels.quantised_linear import BLOCK_BYTES, GROUP, BlockFormat, BlockMatrix


def shape_of(**changes: Any) -> ModelShape:
    """Return a small shape none of whose sizes is a multiple of a register, a tile or another size.

    Beside fields of the shape, `num_layers`, `windows`, `rope_theta`, `rope_scaling` and `rotary_width` make
    its layers and its only rotation.
    """
    sizes: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 131,
        "hidden_size": 100,
        "num_heads": 6,
        "num_kv_heads": 3,
        "head_dim": 40,
        "intermediate_size": 150,
        "rms_eps": 1e-5,
        "max_context": 4096,
    }
    sizes |= changes
    theta, scaling = sizes.pop("rope_theta", 10000.0), sizes.pop("rope_scaling", None)
    width = sizes.pop("rotary_width", sizes["head_dim"])
    count, windows = sizes.pop("num_layers", 2), sizes.pop("windows", ())
    made = {
        "rotations": (Rotation(theta, width, scaling),),
        "layers": tuple(LayerShape(window) for window in windows or (None,) * count),
    }
    return ModelShape(**{**made, **sizes})


def weights_of(shape: ModelShape, dtype: torch.dtype, seed: int = 5) -> Weights:
    """Random weights with norms about one and biases that show when they are missing."""
    generator = torch.Generator().manual_seed(seed)

    def random_tensor(name: str, size: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(size, generator=generator)
        if name.endswith(("router", "router_bias", "correction_bias", "sinks")):
            return values
        if name.endswith("norm"):
            return (1.0 + 0.3 * values).to(dtype)
        return (values * (0.3 if name.endswith("bias") else size[-1] ** -0.5)).to(dtype)

    layers = [
        layer_weights(shape, {name: random_tensor(name, size) for name, size in layer_shapes(shape, layer)})
        for layer in range(shape.num_layers)
    ]
    matrix = (shape.vocab_size, shape.hidden_size)
    return Weights(
        embed=random_tensor("embed", matrix) * 5,
        layers=tuple(layers),
        final_norm=random_tensor("final_norm", (shape.hidden_size,)),
        head=None if shape.tied_embeddings else random_tensor("head", matrix) * 3,
        final_norm_bias=random_tensor("bias", (shape.hidden_size,)) if shape.norm_bias else None,
    )


def random_blocks(rows: int, columns: int, format: BlockFormat, seed: int = 5) -> BlockMatrix:
    """Return a matrix of random bytes in blocks: every value that the format has, scales of both signs."""
    generator = torch.Generator().manual_seed(seed)
    count = -(-columns // GROUP)
    blocks = torch.randint(0, 256, (rows, count, BLOCK_BYTES[format]), generator=generator).to(torch.uint8)
    if format == "mxfp4":
        least = 126 - round(math.log2(columns) / 2)
        powers = torch.randint(least - 2, least + 1, (rows, count), generator=generator)
        blocks[..., 0] = powers.to(torch.uint8)
        return BlockMatrix(format, columns, blocks.view(rows, -1))
    # So that outputs are about as large as inputs.
    wide = {"q4_0": 8, "q4_1": 8, "q8_0": 80, "iq4_nl": 80}[format]
    scales = torch.randn((rows, count, 1), generator=generator) / (wide * columns**0.5)
    blocks[..., :2] = scales.half().view(torch.uint8)
    if format == "q4_1":
        blocks[..., 2:4] = (-8 * scales).half().view(torch.uint8)
    return BlockMatrix(format, columns, blocks.view(rows, -1))


def with_matrices(weights: Weights, make: Callable[[int, Any], Any]) -> Weights:
    """Return the weights with `make(number, matrix)` in place of each matrix but the head and routers."""
    names = ("q", "k", "v", "o", "gate", "up", "down", "q_gate")
    shared = ("shared_gate", "shared_up", "shared_down")

    def of_experts(experts: ExpertWeights, first: int) -> ExpertWeights:
        many = {
            name: tuple(make(first + 3 * i + j, matrix) for i, matrix in enumerate(getattr(experts, name)))
            for j, name in enumerate(("gates", "ups", "downs"))
        }
        one = {
            name: make(first + 1000 + j, getattr(experts, name))
            for j, name in enumerate(shared)
            if getattr(experts, name) is not None
        }
        return replace(experts, **many, **one)

    def of_layer(index: int, layer: LayerWeights) -> LayerWeights:
        matrices = {
            name: make(10 * index + number, getattr(layer, name))
            for number, name in enumerate(names)
            if getattr(layer, name) is not None and getattr(layer, name).shape[0]
        }
        if layer.recurrent is not None:
            matrices["recurrent"] = {
                name: make(10 * index + 8 + name.startswith("out"), one) if name.endswith("_proj") else one
                for name, one in layer.recurrent.items()
            }
        experts = None if layer.experts is None else of_experts(layer.experts, 100 + 2000 * index)
        return replace(layer, **matrices, experts=experts)

    layers = tuple(of_layer(index, layer) for index, layer in enumerate(weights.layers))
    return replace(weights, layers=layers)


def block_weights_of(shape: ModelShape, format: BlockFormat, seed: int = 5) -> Weights:
    """Random weights whose matrices are in blocks, the head in q8_0 as files have it."""
    dense = weights_of(shape, torch.float32, seed)
    blocks = with_matrices(dense, lambda number, matrix: random_blocks(*matrix.shape, format, seed + number))
    head = random_blocks(shape.vocab_size, shape.hidden_size, "q8_0", seed + 9)
    return replace(blocks, embed=dense.embed.bfloat16(), head=head)


def coded_weights_of(shape: ModelShape, format: BlockFormat, seed: int = 5) -> Weights:
    """Random weights whose matrices are in codes, the head in bytes as files give it."""
    coded = with_matrices(block_weights_of(shape, format, seed), lambda _, matrix: code_matrix(matrix))
    return replace(coded, head=byte_weights_of(shape, seed).head)


def byte_weights_of(shape: ModelShape, seed: int = 5) -> Weights:
    """Random weights whose matrices are in bytes."""
    dense = weights_of(shape, torch.float32, seed)
    in_bytes = with_matrices(dense, lambda _, matrix: quantise_matrix(matrix))
    return replace(in_bytes, embed=dense.embed.bfloat16(), head=quantise_matrix(dense.output_matrix()))


KINDS: dict[str, tuple[int, torch.dtype, Callable[[ModelShape], Weights]]] = {
    "fp32": (native.FP32, torch.float32, lambda shape: weights_of(shape, torch.float32)),
    "bf16": (native.BF16, torch.bfloat16, lambda shape: weights_of(shape, torch.bfloat16)),
    "blocks": (native.BLOCKS, torch.bfloat16, lambda shape: block_weights_of(shape, "q4_1")),
    "bytes": (native.BYTES, torch.bfloat16, byte_weights_of),
    "codes": (native.BYTES, torch.bfloat16, lambda shape: coded_weights_of(shape, "q4_1")),
}
"""Kinds of matrices: their number in the native step, what keys and values are kept in, random weights."""
EVERY_SET = [(kind, name) for kind in KINDS for name in native.instruction_sets(KINDS[kind][0])]


def layout_of(shape: ModelShape, block_size: int, dtype: torch.dtype) -> KVLayout:
    return KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, block_size, dtype)


@dataclass
class Pool:
    """A memory whose blocks are dealt in random order; untouched blocks hold NaN (in int8, scales of NaN), so
    that reading one shows.
    """

    layout: KVLayout
    num_blocks: int
    seed: int = 0
    memory: KVMemory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = KVMemory(self.layout, self.num_blocks)
        self.memory.blocks.fill_(0xFF)
        self._free = list(range(self.num_blocks))
        random.Random(self.seed).shuffle(self._free)

    def table(self, num_tokens: int) -> list[int]:
        """Fresh blocks for that many tokens."""
        return [self._free.pop() for _ in range(self.layout.blocks_for(num_tokens))]

    def sequence(self, num_tokens: int) -> Sequenced:
        """Return a sequence of at most that many tokens."""
        return Sequenced(self.memory, self.table(num_tokens))


@dataclass
class Sequenced:
    """A sequence in a pool that makes its steps."""

    memory: KVMemory
    table: list[int]
    length: int = 0

    def step(self, token_ids: Sequence[int], wants_logits: bool = True, trailing: int = 1) -> SequenceStep:
        """Return the step of the next tokens; the sequence has them from now on."""
        start, self.length = self.length, self.length + len(token_ids)
        return SequenceStep(self.memory, self.table, start, token_ids, wants_logits, trailing)


def tokens_of(count: int, vocab_size: int = 131, seed: int = 1) -> list[int]:
    """Random token ids."""
    chooser = random.Random(seed)
    return [chooser.randrange(vocab_size) for _ in range(count)]
