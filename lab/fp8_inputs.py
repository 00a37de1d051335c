"""`python -m lab.fp8_inputs`: KL of FP8 products by how their inputs are rounded, by the meaning, on a CPU.

The reference is the same rounded weights in float32 with inputs as they are (kernels/scaled_matrix.py), so
that only the rounding of inputs is seen. Everything else is float32 on both sides.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights import Weights
from diptych.engine.weights.checkpoint import read_checkpoint
from diptych.runtime.settings import resolve_model
from diptych.runtime.tokenizer.tokenizer import Tokenizer
from kernels import scaled_matrix
from kernels.scaled_matrix import FP8, PEAK, SQUARE
from lab.quality.matrices import with_matrices
from lab.quality.text import python_reference, windows

PRODUCTS = ("qkv", "o", "up", "down")
_BLOCK = 16
Rounding = Callable[[torch.Tensor], torch.Tensor]
"""Inputs `[T, columns]` as a product sees them, float32."""


@dataclass(frozen=True)
class Way:
    """Rounding of the inputs of each product."""

    name: str
    of_product: Mapping[str, Rounding]
    """Roundings by PRODUCTS; those that are missing take inputs in bfloat16."""
    ends: int = 0
    """First layers, and as many last ones, that take inputs in bfloat16."""
    prompt: bool = False
    """True if only the first half of each piece is rounded: a prompt, and what is decoded after it."""


def rows_of(x: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """Round to E4M3 with a scale for each `width` numbers, the largest one's; a row's where None."""
    groups = _groups(x, width)
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / PEAK[FP8]
    return _rounded(groups, scales).flatten(1)[:, : x.shape[1]]


def nearest(x: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """Round as `rows_of`, with that of sixteen scales over an octave which leaves the least squares."""
    groups = _groups(x, width)
    peak = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / PEAK[FP8]
    best, least = groups, torch.full(groups.shape[:-1], torch.inf)
    for step in range(16):
        tried = _rounded(groups, peak * 2 ** (-step / 16))
        squares = (tried - groups).square().sum(-1)
        best = torch.where((squares < least).unsqueeze(-1), tried, best)
        least = torch.minimum(squares, least)
    return best.flatten(1)[:, : x.shape[1]]


def two_terms(x: torch.Tensor) -> torch.Tensor:
    """Round to E4M3, and what that leaves once more, with a scale of its own."""
    first = rows_of(x)
    return first + rows_of(x - first)


def largest_twice(x: torch.Tensor, share: int = 16) -> torch.Tensor:
    """Round as `two_terms` the largest of every `share` numbers of a row, the others once."""
    kept = x.abs().topk(x.shape[1] // share, dim=1).indices
    chosen = torch.zeros_like(x, dtype=torch.bool).scatter_(1, kept, True)
    return torch.where(chosen, two_terms(x), rows_of(x))


def _groups(x: torch.Tensor, width: int | None) -> torch.Tensor:
    wide = width or x.shape[1]
    groups: torch.Tensor = functional.pad(x, (0, -x.shape[1] % wide)).unflatten(1, (-1, wide))
    return groups


def _rounded(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    peak = PEAK[FP8]
    return (numbers / scales).clamp(-peak, peak).to(FP8).float() * scales


def _all(rounding: Rounding, *but: str) -> dict[str, Rounding]:
    return {name: rounding for name in PRODUCTS if name not in but}


WAYS: tuple[Way, ...] = (
    Way("bfloat16", {}),
    Way("a scale a row", _all(rows_of)),
    Way("a scale a row, of least squares", _all(nearest)),
    Way("a scale for 128 numbers", _all(lambda x: rows_of(x, SQUARE))),
    Way("a scale for 128 numbers, of least squares", _all(lambda x: nearest(x, SQUARE))),
    *(Way(f"{name} alone", {name: rows_of}) for name in PRODUCTS),
    Way("all but down", _all(rows_of, "down")),
    Way("all but down, o", _all(rows_of, "down", "o")),
    Way("all but two layers at each end", _all(rows_of), ends=2),
    Way("all but down, and two layers at each end", _all(rows_of, "down"), ends=2),
    Way("two terms of the largest 16th", _all(largest_twice)),
    Way("two terms of the largest quarter", _all(lambda x: largest_twice(x, 4))),
    Way("two terms of the largest 8th", _all(lambda x: largest_twice(x, 8))),
    Way("two terms", _all(two_terms)),
    Way("a scale a row in prompts, bfloat16 behind them", _all(rows_of), prompt=True),
)


def mean_kl(
    shape: ModelShape, weights: Weights, ways: Sequence[Way], pieces: Sequence[Sequence[int]]
) -> Iterator[tuple[Way, list[float]]]:
    """Yield each way's mean KL, in nats, over each piece of text, from inputs as they are."""
    meaning, rounded = TorchBackend(shape, weights), TorchBackend(shape, weights)
    exact = [_logits(meaning, shape, piece) for piece in pieces]
    for way in ways:
        rounded._decoder._linear = _products(rounded, way)
        seen = [_logits(rounded, shape, piece) for piece in pieces]
        # Of a prompt and what follows, what follows.
        pairs = [
            (one[len(one) // 2 :], other[len(one) // 2 :]) if way.prompt else (one, other)
            for one, other in zip(exact, seen, strict=True)
        ]
        yield way, [float((one.exp() * (one - other)).sum(-1).mean()) for one, other in pairs]


def _products(backend: TorchBackend, way: Way) -> Callable[..., torch.Tensor]:
    """Return the product of the decoder that rounds the inputs of its layers' matrices."""
    layers = backend._decoder.layers
    roundings: dict[int, Rounding] = {}

    def short(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().float()

    for index, layer in enumerate(layers):
        inner = way.ends <= index < len(layers) - way.ends
        for name in PRODUCTS:
            rounding = way.of_product.get(name) if inner else None
            roundings[id(getattr(layer, name))] = rounding or short

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rounding = roundings.get(id(weight))
        if rounding is None:
            return functional.linear(x, weight, bias)
        half = len(x) // 2 if way.prompt else len(x)
        return functional.linear(torch.cat([rounding(x[:half]), short(x[half:])]), weight, bias)

    return linear


def _logits(backend: TorchBackend, shape: ModelShape, token_ids: Sequence[int]) -> torch.Tensor:
    """Return log-probabilities after each token, `[tokens, vocab]`."""
    layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, _BLOCK, torch.float32)
    blocks = layout.blocks_for(len(token_ids))
    memory = KVMemory.on_device(layout, blocks, torch.device("cpu"))
    step = SequenceStep(memory, range(blocks), 0, list(token_ids), True, trailing=len(token_ids))
    return backend.forward([step], None).float().log_softmax(-1)


def _in_fp8(weights: Weights) -> Weights:
    """Return the weights with the numbers that their layers' matrices have in FP8, a scale a row."""

    def rounded(matrix: torch.Tensor) -> torch.Tensor:
        return scaled_matrix.dequantise(scaled_matrix.quantise(matrix, FP8))

    return with_matrices(weights, rounded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    asked = parser.parse_args()
    path = resolve_model("bundled")
    found = read_checkpoint(path, "fp32")
    ids = Tokenizer.load(path).encode(python_reference().content)
    pieces = windows(ids, asked.windows, asked.tokens)
    with torch.inference_mode():
        for way, each in mean_kl(found.shape, _in_fp8(found.weights), WAYS, pieces):
            middle = sum(each) / len(each)
            print(f"{way.name:44} {middle:.5f} ({min(each):.5f} to {max(each):.5f})", flush=True)


if __name__ == "__main__":
    main()
