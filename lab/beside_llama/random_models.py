"""Random models as GGUF files: Llama-3.2-1B's shape in Q4_K_M, and a small one with experts in bf16.

Speed asks for shapes and types, not for sense. Blocks are filled with random codes and scales of which every
value is a legal one; products then have inputs as large as a real model's.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers

CONTEXT = 2048
_ROWS_AT_ONCE = 1024
_SUPERBLOCK = 256
_LEAST_SCALE, _MOST_SCALE = 24, 64  # of six bits; a block of small ones would be rounded away in products
_MEAN_SCALE = (_LEAST_SCALE + _MOST_SCALE - 1) / 2
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Model:
    """A shape. `experts` is 0 for a dense feed-forward, whose width `inner` is then."""

    name: str
    architecture: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    theta: float
    experts: int = 0
    experts_a_token: int = 0


LLAMA_1B = Model("llama-1b-Q4_K_M", "llama", 16, 2048, 8192, 32, 8, 64, 128_256, 500_000.0)
"""1.24 billion weights, the output matrix shared with the embedding."""
EXPERTS_1B = Model(
    "experts-1b-BF16",
    "qwen3moe",
    12,
    1024,
    768,
    16,
    4,
    64,
    49_152,
    1_000_000.0,
    experts=32,
    experts_a_token=4,
)
"""0.99 billion weights, of which a token meets 0.19 billion."""


def write(model: Model, folder: Path) -> Path:
    """Write the model's file unless it is there, and return its path."""
    path = path_of(model, folder)
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, model.architecture)
    _add_shape(writer, model)
    _add_vocabulary(writer, model.vocabulary)
    random = np.random.default_rng(7)
    for name, kind, shape in tensors(model):
        if kind is Kind.F32:
            writer.add_tensor(name, _plain(name, shape, random))
        else:
            writer.add_tensor(name, MAKE[kind](shape, random), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(path)


def path_of(model: Model, folder: Path) -> Path:
    """Return the place of a model's file."""
    return folder / f"{model.name}.gguf"


def tensors(model: Model) -> Iterator[tuple[str, Kind, tuple[int, ...]]]:
    """Yield each tensor's name, type and shape, the number of columns last."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    large, usual = (Kind.BF16, Kind.BF16) if model.experts else (Kind.Q6_K, Kind.Q4_K)
    yield "token_embd.weight", large, (model.vocabulary, model.hidden)
    yield "output_norm.weight", Kind.F32, (model.hidden,)
    for number in range(model.layers):
        more = large if _has_more_bits(number, model.layers) else usual
        parts: list[tuple[str, Kind, tuple[int, ...]]] = [
            ("attn_norm", Kind.F32, (model.hidden,)),
            ("attn_q", usual, (queries, model.hidden)),
            ("attn_k", usual, (keys, model.hidden)),
            ("attn_v", more, (keys, model.hidden)),
            ("attn_output", usual, (model.hidden, queries)),
            ("ffn_norm", Kind.F32, (model.hidden,)),
        ]
        if model.experts:
            rows, columns = (
                (model.experts, model.inner, model.hidden),
                (model.experts, model.hidden, model.inner),
            )
            parts += [(f"attn_{one}_norm", Kind.F32, (model.head_dim,)) for one in "qk"]
            parts += [("ffn_gate_inp", Kind.F32, (model.experts, model.hidden))]
            parts += [
                ("ffn_gate_exps", usual, rows),
                ("ffn_up_exps", usual, rows),
                ("ffn_down_exps", usual, columns),
            ]
        else:
            rows_of = (model.inner, model.hidden)
            parts += [("ffn_gate", usual, rows_of), ("ffn_up", usual, rows_of)]
            parts += [("ffn_down", more, (model.hidden, model.inner))]
        for name, kind, shape in parts:
            yield f"blk.{number}.{name}.weight", kind, shape


def _has_more_bits(layer: int, layers: int) -> bool:
    """Return whether llama-quantize gives a layer's values and `down` Q6_K in Q4_K_M."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _plain(name: str, shape: tuple[int, ...], random: np.random.Generator) -> npt.NDArray[np.float32]:
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    return random.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)


def _bf16(shape: tuple[int, ...], random: np.random.Generator) -> npt.NDArray[np.uint16]:
    made = np.empty(shape, np.uint16)
    flat = made.reshape(-1, shape[-1])
    for start in range(0, len(flat), _ROWS_AT_ONCE):
        part = flat[start : start + _ROWS_AT_ONCE]
        numbers = random.standard_normal(part.shape, np.float32) * np.float32(shape[-1] ** -0.5)
        part[:] = numbers.view(np.uint32) >> 16
    return made


def _q4_k(shape: tuple[int, ...], random: np.random.Generator) -> Bytes:
    """Return super-blocks of d, dmin, scales and minima of 6 bits, codes of 4 bits (ggml-common.h).

    Each minimum equals its scale and dmin is 7.5 d, so that a number is d times scale times (code - 7.5).
    """
    blocks = _blocks(shape, 144, random)
    step = shape[-1] ** -0.5 / (4.61 * _MEAN_SCALE)  # 4.61: deviation of codes from 0 to 15
    blocks[..., 0:2] = _half(step)
    blocks[..., 2:4] = _half(7.5 * step)
    scales = random.integers(_LEAST_SCALE, _MOST_SCALE, (*blocks.shape[:-1], 8), np.uint8)
    first, last = scales[..., :4], scales[..., 4:]
    blocks[..., 4:8] = blocks[..., 8:12] = first | last >> 4 << 6
    blocks[..., 12:16] = last & 15 | (last & 15) << 4
    return blocks.reshape(*shape[:-1], -1)


def _q6_k(shape: tuple[int, ...], random: np.random.Generator) -> Bytes:
    """Return super-blocks of codes of 6 bits, scales of 8, and d.

    A number is d times scale times (code - 32).
    """
    blocks = _blocks(shape, 210, random)
    blocks[..., 192:208] = random.integers(_LEAST_SCALE, _MOST_SCALE, (*blocks.shape[:-1], 16), np.uint8)
    blocks[..., 208:210] = _half(shape[-1] ** -0.5 / (18.5 * _MEAN_SCALE))  # 18.5: of codes from 0 to 63
    return blocks.reshape(*shape[:-1], -1)


def _blocks(shape: tuple[int, ...], size: int, random: np.random.Generator) -> Bytes:
    return random.integers(0, 256, (*shape[:-1], shape[-1] // _SUPERBLOCK, size), np.uint8)


def _half(value: float) -> Bytes:
    return np.array([value], np.float16).view(np.uint8)


MAKE: dict[
    Kind, Callable[[tuple[int, ...], np.random.Generator], npt.NDArray[np.uint8] | npt.NDArray[np.uint16]]
] = {
    Kind.BF16: _bf16,
    Kind.Q4_K: _q4_k,
    Kind.Q6_K: _q6_k,
}


def _add_shape(writer: gguf.GGUFWriter, model: Model) -> None:
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(model.hidden)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(model.inner)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.theta)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(model.vocabulary)
    if model.experts:
        writer.add_expert_count(model.experts)
        writer.add_expert_used_count(model.experts_a_token)
        writer.add_expert_feed_forward_length(model.inner)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Add a byte-level vocabulary: bytes, then words of two and three letters, then an end."""
    letters = string.ascii_letters
    words = itertools.chain(
        ((a, b) for a, b in itertools.product(letters, repeat=2)),
        ((a + b, c) for a, b, c in itertools.product(letters, repeat=3)),
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(itertools.islice(words, size - len(alphabet) - 1))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*alphabet, *(a + b for a, b in merges), "<|endoftext|>"])
    writer.add_token_types([*[gguf.TokenType.NORMAL] * (size - 1), gguf.TokenType.CONTROL])
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(False)
