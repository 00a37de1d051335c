"""Models of real sizes with random weights, made on the device: speed does not ask what they say."""

from __future__ import annotations

import torch

from diptych.engine.models.shape import LayerShape, ModelShape, Rotation
from diptych.engine.weights import Weights
from diptych.engine.weights.canonical import layer_shapes, layer_weights

LLAMA_3_8B = ModelShape(
    family="llama",
    vocab_size=128_256,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14_336,
    rms_eps=1e-5,
    max_context=8192,
    layers=(LayerShape(),) * 32,
    rotations=(Rotation(500_000.0, 128),),
)
QWEN3_8B = ModelShape(
    family="qwen3",
    vocab_size=151_936,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=12_288,
    rms_eps=1e-6,
    max_context=8192,
    layers=(LayerShape(),) * 36,
    rotations=(Rotation(1_000_000.0, 128),),
    qk_norm="head",
)


def random_weights(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Weights:
    """Weights that keep activations about one: what overflows or vanishes would not be a fair load."""

    def tensor(name: str, size: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm"):
            return torch.ones(size, dtype=dtype, device=device)
        kind = torch.float32 if name.endswith("router") else dtype
        return torch.randn(size, dtype=kind, device=device).mul_(size[-1] ** -0.5)

    matrix = (shape.vocab_size, shape.hidden_size)
    layers = tuple(
        layer_weights(shape, {name: tensor(name, size) for name, size in layer_shapes(shape, layer)})
        for layer in range(shape.num_layers)
    )
    return Weights(
        embed=tensor("embed", matrix),
        layers=layers,
        final_norm=tensor("final_norm", (shape.hidden_size,)),
        head=None if shape.tied_embeddings else tensor("head", matrix),
    )


def matrix_elements(shape: ModelShape) -> int:
    """Numbers in the matrices that a step reads: those of the layers and the head, not the embedding."""
    layers = sum(
        size[0] * size[1]
        for layer in range(shape.num_layers)
        for _, size in layer_shapes(shape, layer)
        if len(size) == 2
    )
    return layers + shape.vocab_size * shape.hidden_size
