"""ModelShape from a GGUF file's metadata, each key with llama.cpp's meaning and default.

What the engine does not compute is refused, by key. That holds for keys made up later too: below `attention.`
and `rope.`, and among the scales, only what is named here passes, and 0, which is llama.cpp's "not set".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeVar

from diptych.engine.models.family import GgufFamily
from diptych.engine.models.registry import gguf_family_of
from diptych.engine.models.rope import yarn_magnitude
from diptych.engine.models.shape import (
    LayerShape,
    ModelShape,
    RopeScaling,
    Rotation,
    UnsupportedModel,
    check_layer_count,
)
from diptych.engine.weights.canonical import BadModelFile
from diptych.engine.weights.gguf_header import GgufHeader, GgufTensor, Scalar

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors of divisors of the rotary frequencies: of every context, or of longrope's."""
_READ = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.attn_factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",  # says how the model was made, not how it is computed
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
_LATENTS = "attention.kv_lora_rank"
"""Key of families with attention over latents."""
_WATCHED_BEGIN = ("attention.", "rope.")
_WATCHED_END = ("_scale", "_softcapping", "use_parallel_residual")


def shape_from_header(
    header: GgufHeader, rope_factors: Mapping[str, Sequence[float]]
) -> tuple[GgufFamily, ModelShape]:
    """Return the family and the shape that a header describes; `rope_factors` are the numbers of those of
    `ROPE_FACTORS` that are present.

    Raises UnsupportedModel or BadModelFile, naming the key or tensor.
    """
    name = str(_required(header.metadata.get("general.architecture"), "general.architecture"))
    family = gguf_family_of(name)
    metadata = _Metadata(name, header, family.read)
    if metadata.get("expert_count") and "expert_count" not in family.read:
        raise UnsupportedModel("expert_count: mixtures of experts are not supported")
    shape = family.switches(
        metadata, _shape(metadata, header.tensors, rope_factors, latents=_LATENTS in family.read)
    )
    _refuse_what_is_not_computed(metadata, shape, family.read)
    return family, shape


class _Metadata:
    """The values below one family's prefix, by the rest of the key and by type."""

    def __init__(self, family: str, header: GgufHeader, read: Collection[str]) -> None:
        self.family = family
        self._values, self._tensors, self._arrays = header.metadata, header.tensors, header.arrays
        for key in header.arrays:
            if key.startswith(f"{family}.") and key.removeprefix(f"{family}.") not in read:
                raise _unread_array(key)

    def has(self, tensor: str) -> bool:
        return tensor in self._tensors

    def key(self, name: str) -> str:
        return f"{self.family}.{name}"

    def items(self) -> Iterator[tuple[str, Scalar]]:
        prefix = self.key("")
        return ((key[len(prefix) :], value) for key, value in self._values.items() if key.startswith(prefix))

    def get(self, name: str) -> Scalar | None:
        if self.key(name) in self._arrays:
            raise _unread_array(self.key(name))
        return self._values.get(self.key(name))

    def integer(self, name: str) -> int | None:
        value = self.get(name)
        if value is not None and not isinstance(value, int):
            raise BadModelFile(f"metadata {self.key(name)} is not a whole number")
        return value

    def number(self, name: str) -> float | None:
        value = self.get(name)
        if isinstance(value, str):
            raise BadModelFile(f"metadata {self.key(name)} is not a number")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        if self.key(name) not in self._arrays:
            return None
        values = self._arrays[self.key(name)]
        if values is None or not all(isinstance(value, int) for value in values):
            raise BadModelFile(f"metadata {self.key(name)} is no short array of whole numbers")
        return tuple(map(int, values))

    def size(self, name: str) -> int:
        return _required(self.integer(name), self.key(name))

    def positive(self, name: str) -> float | None:
        value = self.number(name)
        if value is not None and not 0 < value < math.inf:
            raise BadModelFile(f"metadata {self.key(name)} is {value}, not a positive number")
        return value


def _unread_array(key: str) -> UnsupportedModel:
    return UnsupportedModel(f"metadata {key} is an array: layers that differ are not computed")


_T = TypeVar("_T")


def _required(value: _T | None, key: str) -> _T:
    if value is None:
        raise BadModelFile(f"metadata {key} is missing or an array")
    return value


def _shape(
    metadata: _Metadata,
    tensors: Mapping[str, GgufTensor],
    rope_factors: Mapping[str, Sequence[float]],
    *,
    latents: bool,
) -> ModelShape:
    """Return the shape that Llama's keys describe; with `latents` keys and values may differ in length."""
    heads, hidden, layers = (
        metadata.size(name) for name in ("attention.head_count", "embedding_length", "block_count")
    )
    if heads < 1 or hidden < 1:
        raise BadModelFile("a model without heads or width")
    check_layer_count(layers)
    width = metadata.integer("attention.key_length") or hidden // heads
    if metadata.integer("attention.value_length") not in (None, width) and not latents:
        raise UnsupportedModel("keys and values of different length")
    rotated = metadata.integer("rope.dimension_count") or width
    window = metadata.integer("attention.sliding_window")
    context = metadata.size("context_length")
    scaling = _rope_scaling(metadata, _checked(rope_factors, rotated // 2), context)
    if "token_embd.weight" not in tensors:
        raise BadModelFile("tensor token_embd.weight is missing")
    theta = metadata.number("rope.freq_base") or 10000.0
    return ModelShape(
        family=metadata.family,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_kv_heads(metadata) or heads,
        head_dim=width,
        intermediate_size=metadata.size("feed_forward_length"),
        rms_eps=_epsilon(metadata),
        max_context=context if scaling is None else scaling.stretched_context(context),
        layers=(LayerShape(window or None),) * layers,
        rotations=(Rotation(theta, rotated, scaling),),
        tied_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="head" if "blk.0.attn_q_norm.weight" in tensors else "none",
    )


def _kv_heads(metadata: _Metadata) -> int | None:
    """Return the KV heads of the layers that have some; of a list by layer, those must be equally many."""
    given = metadata.integers("attention.head_count_kv")
    if given is None:
        return metadata.integer("attention.head_count_kv")
    found = set(given) - {0}
    if len(found) > 1:
        raise UnsupportedModel("metadata attention.head_count_kv: layers that differ are not computed")
    return found.pop() if found else None


def _epsilon(metadata: _Metadata) -> float:
    names = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
    given = [found for name in names if (found := metadata.number(name)) is not None]
    return _required(given[0] if given else None, metadata.key(names[0]))


def _checked(given: Mapping[str, Sequence[float]], pairs: int) -> Mapping[str, tuple[float, ...]]:
    for name, factors in given.items():
        if len(factors) != pairs:
            raise BadModelFile(f"tensor {name} has {len(factors)} factors for {pairs} pairs of lanes")
        if not all(0 < factor < math.inf for factor in factors):
            raise BadModelFile(f"tensor {name} has factors that are not positive numbers")
    return {name: tuple(factors) for name, factors in given.items()}


def _rope_scaling(
    metadata: _Metadata, given: Mapping[str, tuple[float, ...]], context: int
) -> RopeScaling | None:
    kind = metadata.get("rope.scaling.type")
    factors, *longrope = (given.get(name) for name in ROPE_FACTORS)
    if kind == "longrope" or any(longrope):
        return _longrope(metadata, factors, *longrope, context=context)
    if kind == "yarn":
        if factors is not None:
            raise UnsupportedModel("rope.scaling.type 'yarn' together with rope_freqs.weight")
        return _yarn(metadata)
    if kind not in (None, "none", "linear"):
        raise UnsupportedModel(f"rope.scaling.type {kind!r}: supported are linear, yarn and longrope")
    if metadata.number("rope.scaling.attn_factor") not in (None, 1.0):
        raise UnsupportedModel(f"metadata {metadata.key('rope.scaling.attn_factor')}: only yarn has one")
    stretch = 1.0 if kind == "none" else _stretch(metadata)
    if factors is not None:
        return RopeScaling("factors", factors=tuple(factor * stretch for factor in factors))
    return None if stretch == 1.0 else RopeScaling("linear", stretch)


def _longrope(
    metadata: _Metadata,
    factors: tuple[float, ...] | None,
    short: tuple[float, ...] | None,
    long: tuple[float, ...] | None,
    *,
    context: int,
) -> RopeScaling:
    if factors is not None:
        raise UnsupportedModel("longrope together with rope_freqs.weight")
    if short is None or long is None:
        raise BadModelFile(f"longrope without tensor {ROPE_FACTORS[1] if short is None else ROPE_FACTORS[2]}")
    original = metadata.size("rope.scaling.original_context_length")
    sharper = metadata.positive("rope.scaling.attn_factor") or 1.0
    return RopeScaling(
        "longrope",
        context / original,
        original,
        attention_factor=sharper,
        factors=short,
        long_factors=long,
    )


def _stretch(metadata: _Metadata) -> float:
    """Return the divisor of all frequencies. Its first name was `rope.scale_linear`; 0 is "not set"."""
    for name in ("rope.scaling.factor", "rope.scale_linear"):
        if (given := metadata.number(name)) is not None:
            return (metadata.positive(name) if given else None) or 1.0
    return 1.0


def _yarn(metadata: _Metadata) -> RopeScaling:
    name = "rope.scaling.factor"
    factor = _required(metadata.positive(name), metadata.key(name))
    original = metadata.size("rope.scaling.original_context_length")
    if original < 1:
        raise BadModelFile("metadata rope.scaling.original_context_length is below 1")
    # llama.cpp multiplies the usual magnitude with this; transformers' attention_factor stands in its place.
    sharper = metadata.positive("rope.scaling.attn_factor")
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=metadata.positive("rope.scaling.yarn_beta_fast") or 32.0,
        beta_slow=metadata.positive("rope.scaling.yarn_beta_slow") or 1.0,
        attention_factor=None if sharper is None else sharper * yarn_magnitude(factor),
    )


def _refuse_what_is_not_computed(metadata: _Metadata, shape: ModelShape, read: Collection[str]) -> None:
    """Raise UnsupportedModel for a key that would change the numbers and is not read."""
    for name, value in metadata.items():
        if (
            name in _READ
            or name in read
            or not (name.startswith(_WATCHED_BEGIN) or name.endswith(_WATCHED_END))
        ):
            continue
        neutral = _neutral(name, shape)
        if isinstance(value, str) or not any(math.isclose(value, one, rel_tol=1e-5) for one in neutral):
            raise UnsupportedModel(f"metadata {metadata.key(name)} {value!r} is not computed")


def _neutral(name: str, shape: ModelShape) -> tuple[float, ...]:
    """Return the values of a key that change nothing."""
    scaling = shape.rotations[0].scaling
    yarn = scaling is not None and scaling.kind == "yarn"
    match name:
        case "attention.causal":
            return (True,)
        case "attention.scale":
            return (0.0, shape.head_dim**-0.5)
        case "attention.key_length_swa" | "attention.value_length_swa" | "rope.dimension_count_swa":
            return (0, shape.head_dim)
        case "rope.freq_base_swa":
            return (0.0, shape.rotations[0].theta)
        case "rope.scaling.yarn_ext_factor":
            return (-1.0, 1.0 if yarn else 0.0)
        case "rope.scaling.yarn_attn_factor":
            # llama.cpp's converter writes transformers' attention_factor here, llama.cpp does not read it for
            # these families: only where both come to the same is it clear what is meant.
            return (yarn_magnitude(scaling.factor) if scaling is not None and yarn else 1.0,)
        case "attention.layer_norm_epsilon":
            return (0.0, shape.rms_eps)
        case _ if name.endswith("_scale"):
            return (0.0, 1.0)
    return (0.0,)
