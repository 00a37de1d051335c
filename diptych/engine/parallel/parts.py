"""Dealing of a model's heads, inner numbers and vocabulary to parts, and of parts to ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from diptych.engine.models.shape import ModelShape, UnsupportedModel


@dataclass(frozen=True)
class Part:
    """Share of every layer, and of the vocabulary, that is computed as if it were alone."""

    heads: range
    """Query heads."""
    kv_heads: range
    """KV heads that these read. Parts share one where there are more parts than KV heads."""
    inner: range
    """Numbers between the two products of the feed-forward."""
    vocab: range
    """Token ids whose embeddings and logits are here."""

    def shape_of(self, shape: ModelShape) -> ModelShape:
        """Return the shape of the narrower model that this part of `shape` is."""
        return replace(
            shape,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
            vocab_size=len(self.vocab),
        )


def why_not_in_parts(shape: ModelShape) -> str | None:
    """Return what of a model is not computed in parts, None if all of it is."""
    if shape.latent is not None:
        return "attention over latents (MLA)"
    if shape.experts is not None:
        return "experts (MoE)"
    if shape.qk_norm == "width":
        return "a norm over the queries of all heads together"
    return None


def deal_parts(shape: ModelShape, count: int) -> tuple[Part, ...]:
    """Deal a model to `count` parts, as evenly as whole KV heads allow.

    With more parts than KV heads, several parts share a KV head and divide its query heads.

    Raises UnsupportedModel for a model that is not computed in parts, or has too little for so many.
    """
    if count > 1 and (why := why_not_in_parts(shape)) is not None:
        raise UnsupportedModel(f"--sum-parts {count}: not computed in parts: {why}")
    for size, what in (
        (shape.num_heads, "query heads"),
        (shape.intermediate_size, "inner numbers of a feed-forward"),
    ):
        if count > size:
            raise UnsupportedModel(f"--sum-parts {count}: the model has {size} {what}")
    heads = _heads(shape, count)
    inner, vocab = deal(shape.intermediate_size, count), deal(shape.vocab_size, count)
    return tuple(Part(*heads[index], inner[index], vocab[index]) for index in range(count))


def deal(size: int, count: int) -> list[range]:
    """Return `count` ranges in a row that cover `size`, whose lengths differ by 1 at most."""
    ends = [index * size // count for index in range(count + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def parts_of_rank(count: int, rank: int, ranks: int) -> range:
    """Return the numbers of the parts that a rank computes. Raises ValueError if they cannot be dealt."""
    if ranks < 1 or count % ranks or not 0 <= rank < ranks:
        raise ValueError(f"{count} parts cannot be dealt evenly to rank {rank} of {ranks}")
    each = count // ranks
    return range(rank * each, (rank + 1) * each)


def _heads(shape: ModelShape, count: int) -> list[tuple[range, range]]:
    """Return the query and the KV heads of each part."""
    group, kv_heads = shape.num_heads // shape.num_kv_heads, shape.num_kv_heads
    if count <= kv_heads:
        return [(range(kv.start * group, kv.stop * group), kv) for kv in deal(kv_heads, count)]
    dealt = []
    for kv_head, sharing in enumerate(deal(count, kv_heads)):
        for own in deal(group, len(sharing)):
            begin = kv_head * group
            dealt.append((range(begin + own.start, begin + own.stop), range(kv_head, kv_head + 1)))
    return dealt
