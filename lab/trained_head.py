"""An EAGLE head trained on answers of its model for some minutes, for lab.trees.

The layer and the losses are those of EAGLE (Li et al., 2024, arXiv:2401.15077, section 4.2): the head is to
give the model's feature of each token, and by the model's output matrix its next token.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from diptych.engine.heads.layer_head import HeadInputs, LayerHead
from diptych.engine.models.shape import LayerShape, ModelShape
from diptych.engine.weights import Weights
from diptych.engine.weights.canonical import layer_shapes, layer_weights

BATCH, RATE, OF_TOKENS, NOISE = 8, 1e-3, 0.1, 0.1
"""Texts of a step of training, its rate, the weight of the loss of tokens, and noise on features."""


@dataclass(frozen=True)
class TrainedText:
    """Tokens, and the model's features of them but the last one's."""

    tokens: Sequence[int]
    features: torch.Tensor


def train(texts: Sequence[TrainedText], model: ModelShape, embed: torch.Tensor, seconds: float) -> LayerHead:
    """Return a head of a model without an output matrix of its own, trained for so long on `texts` of one
    length.
    """
    shape = replace(model, layers=(LayerShape(),))
    weights = _first(shape)
    tokens = torch.tensor([text.tokens[:-1] for text in texts])
    following = torch.tensor([text.tokens[1:] for text in texts])
    features = torch.stack([text.features for text in texts])
    embed, scale = embed.float(), 1 / float(features.std())
    optimizer = torch.optim.AdamW(weights.values(), lr=RATE, weight_decay=0.01)
    began, order, step, loss = time.monotonic(), list(range(len(texts))), 0, torch.zeros(())
    while (left := 1 - (time.monotonic() - began) / seconds) > 0:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, 3 * left, (step + 1) / 20)
        some = random.Random(step).sample(order, BATCH)
        wanted = features[some]
        before = functional.pad(wanted[:, :-1], (0, 0, 1, 0))
        given = _layer(
            shape, weights, embed[tokens[some]], before + NOISE / scale * torch.randn(before.shape)
        )
        logits = given.flatten(0, 1) @ embed.T
        loss = functional.smooth_l1_loss(scale * given, scale * wanted)
        loss = loss + OF_TOKENS * functional.cross_entropy(logits, following[some].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    print(f"{step} steps of {BATCH} answers, loss {loss.item():.3f}", flush=True)
    made = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    inputs = HeadInputs(made.pop("fc"))
    layer = replace(
        layer_weights(shape, {**made, "input_norm": torch.ones(shape.hidden_size)}), input_norm=None
    )
    kept = Weights(embed=embed, layers=(layer,), final_norm=torch.empty(0), head=embed)
    return LayerHead(shape, kept, inputs, (model.num_layers,), normed=False)


def _first(shape: ModelShape) -> dict[str, torch.Tensor]:
    """Return weights to begin with: the head gives the feature that it reads, and little else."""
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.ones(size)
        if len(size) == 1
        else torch.randn(size, generator=generator) * size[-1] ** -0.5 * (0.1 if name in ("o", "down") else 1)
        for name, size in layer_shapes(shape, 0)
        if name != "input_norm"
    }
    hidden = shape.hidden_size
    weights["fc"] = torch.cat([torch.randn(hidden, hidden, generator=generator) * 0.02, torch.eye(hidden)], 1)
    return {name: tensor.requires_grad_() for name, tensor in weights.items()}


def _layer(
    shape: ModelShape, weights: Mapping[str, torch.Tensor], embedded: torch.Tensor, before: torch.Tensor
) -> torch.Tensor:
    """Return what the head gives, `[texts, tokens, hidden]`, of embeddings and the features before them."""
    x = torch.cat([embedded, before], -1) @ weights["fc"].T
    count, length, _ = x.shape
    positions = torch.arange(length)

    def heads(name: str, number: int) -> torch.Tensor:
        return (x @ weights[name].T).view(count, length, number, shape.head_dim).transpose(1, 2)

    q, k, v = heads("q", shape.num_heads), heads("k", shape.num_kv_heads), heads("v", shape.num_kv_heads)
    q, k = _rotated(shape, q, positions), _rotated(shape, k, positions)
    seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + seen.transpose(1, 2).flatten(2) @ weights["o"].T
    normed = functional.rms_norm(x, x.shape[-1:], weights["post_norm"], shape.rms_eps)
    gate, up = normed @ weights["gate"].T, normed @ weights["up"].T
    return x + (functional.silu(gate) * up) @ weights["down"].T


def _rotated(shape: ModelShape, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return `[texts, heads, tokens, head_dim]` with rotary positions."""
    half = shape.head_dim // 2
    speeds = shape.rotations[0].theta ** (-torch.arange(half) / half)
    angles = positions[:, None] * speeds
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
