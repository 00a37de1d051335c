"""Dealing of a model's heads, inner numbers, experts and vocabulary to parts, and of parts to ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from diptych.engine.models.shape import ExpertsShape, ModelShape, UnsupportedModel


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
    experts: range | None = None
    """Experts that are here whole; None: this part has some inner numbers of every expert."""
    expert_inner: range = range(0)
    """Inner numbers of each expert that is here."""
    shared_inner: range = range(0)
    """Inner numbers of the expert that every token passes."""
    sends_rows: bool = False
    """Rows are sent to their experts, and this part goes on with its share of them (all-to-all)."""

    @property
    def is_first(self) -> bool:
        """True for the part that adds what is added once: biases of the products that parts add."""
        return self.heads.start == 0

    def shape_of(self, shape: ModelShape) -> ModelShape:
        """Return the shape of the narrower model that this part of `shape` is."""
        return replace(
            shape,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
            vocab_size=len(self.vocab),
            experts=None if shape.experts is None else self._experts_of(shape.experts),
        )

    def _experts_of(self, experts: ExpertsShape) -> ExpertsShape:
        return replace(
            experts,
            held=self.experts,
            intermediate_size=len(self.expert_inner),
            shared_size=len(self.shared_inner),
        )


def deal_parts(
    shape: ModelShape,
    count: int,
    *,
    whole_experts: bool = False,
    all_to_all: bool = False,
    unit: int = 1,
) -> tuple[Part, ...]:
    """Deal a model to `count` parts, as evenly as whole KV heads allow.

    With more parts than KV heads, several parts share a KV head and divide its query heads. Experts are dealt
    whole, or each one's inner numbers as those of a dense feed-forward are. Where rows are sent to whole
    experts, `all_to_all`, every part has the whole expert of every token for its rows. Inner numbers are
    dealt in multiples of `unit` (`fair_unit`), at which matrices that stay quantised are cut.

    Raises UnsupportedModel for a model that has too little for so many parts, or no experts to deal.
    """
    if whole_experts and shape.experts is None:
        raise UnsupportedModel("--expert-parallel: the model has no experts")
    for size, what in _dealt_sizes(shape, whole_experts, all_to_all):
        if count > size:
            raise UnsupportedModel(f"--sum-parts {count}: the model has {size} {what}")
    heads = _heads(shape, count)
    inner = _inner(shape, heads, unit)
    vocab = deal(shape.vocab_size, count)
    return tuple(
        Part(
            *heads[index],
            inner[index],
            vocab[index],
            **_dealt_experts(shape, count, index, whole_experts, all_to_all, unit),
        )
        for index in range(count)
    )


def _dealt_sizes(shape: ModelShape, whole_experts: bool, all_to_all: bool) -> Iterator[tuple[int, str]]:
    """Yield the numbers of all that is dealt, and their names."""
    yield shape.num_heads, "query heads"
    if not all(layer.experts for layer in shape.layers):
        yield shape.intermediate_size, "inner numbers of a feed-forward"
    if (experts := shape.experts) is None:
        return
    if whole_experts:
        yield experts.num_experts, "experts"
    else:
        yield experts.intermediate_size, "inner numbers of an expert"
    if experts.shared_size and not all_to_all:
        yield experts.shared_size, "inner numbers of the shared expert"


def _dealt_experts(
    shape: ModelShape, count: int, index: int, whole: bool, all_to_all: bool, unit: int
) -> dict[str, Any]:
    """Return the fields of part `index` that say what it has of experts."""
    if (experts := shape.experts) is None:
        return {}
    size, shared = experts.intermediate_size, experts.shared_size
    return {
        "experts": deal(experts.num_experts, count)[index] if whole else None,
        "expert_inner": range(size) if whole else deal(size, count, unit)[index],
        "shared_inner": range(shared) if all_to_all else deal(shared, count, unit)[index],
        "sends_rows": all_to_all,
    }


def deal(size: int, count: int, unit: int = 1) -> list[range]:
    """Return `count` ranges in a row that cover `size`, whose lengths differ by 1 at most; or by one
    `fair_unit` of at most `unit`, at whose multiples they end then.
    """
    unit = fair_unit(size, count, unit)
    units = -(-size // unit)
    ends = [min(index * units // count * unit, size) for index in range(count + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def fair_unit(size: int, count: int, unit: int) -> int:
    """Return the largest of `unit`, its half, quarter and so on down to 16 that gives no part more than a
    sixteenth above its share of `size`; the last one if all do, and 1 if that leaves a part with nothing.
    """
    while unit > LEAST_UNIT:
        most = -(-size // unit // count) * unit
        if 16 * most * count <= 17 * size:
            return unit
        unit //= 2
    return unit if size > (count - 1) * unit else 1


CUT_UNIT = 128
"""Inner numbers at whose multiples a model is dealt whose matrices stay quantised: groups of 32, 64 or 128
columns end there, and squares of FP8.
"""
LEAST_UNIT = 16
"""Columns at whose multiples codes can be cut (kernels/packed_matrix.py)."""
_INNER_UNIT = 32
"""Inner numbers to whose multiples uneven shares are rounded: products are padded to it."""
_MOST_NUMBERS = 1.09
"""Numbers of a layer that a part may have, in even shares: a rank holds at most a tenth more than one."""


def _inner(shape: ModelShape, heads: Sequence[tuple[range, range]], unit: int) -> list[range]:
    """Return the inner numbers of each part: evenly, as ranks wait for one another behind attention and again
    behind the feed-forward. Where a part's heads make it too large, it has fewer.
    """
    count = len(heads)
    # Where every layer has experts, nothing has these inner numbers.
    size = max(shape.intermediate_size, count)
    lanes = [2 * (len(own) + len(kv)) * shape.head_dim for own, kv in heads]  # of q and o, k and v
    if shape.experts is not None or len(set(lanes)) == 1:
        return deal(size, count, unit)
    matrices = 3 if shape.gated else 2
    fair = (sum(lanes) + matrices * size) / count
    most = [max((_MOST_NUMBERS * fair - own) / matrices, 1.0) for own in lanes]
    level = _level(most, size)
    wanted = [min(level, own) for own in most]
    least = fair_unit(size, count, unit)
    unit = max(least, _INNER_UNIT if size >= 8 * count * _INNER_UNIT else 1)
    borders = [0]
    for part, end in enumerate(accumulate(wanted[:-1]), start=1):
        rounded = round(size * end / sum(wanted) / unit) * unit
        last = (size - (count - part) * least) // least * least
        borders.append(min(max(rounded, borders[-1] + least), last))
    return [range(begin, end) for begin, end in pairwise([*borders, size])]


def _level(most: Sequence[float], size: int) -> float:
    """Return the share of `size` that all have but those whose `most` is less."""
    left = float(size)
    for others, own in enumerate(sorted(most)):
        share = left / (len(most) - others)
        if own >= share:
            return share
        left -= own
    return max(most)


def parts_of_rank(count: int, rank: int, ranks: int) -> range:
    """Return the numbers of the parts that a rank computes. Raises ValueError if they cannot be dealt."""
    if ranks < 1 or count % ranks or not 0 <= rank < ranks:
        raise ValueError(f"{count} parts cannot be dealt evenly to rank {rank} of {ranks}")
    each = count // ranks
    return range(rank * each, (rank + 1) * each)


def experts_of_ranks(parts: Sequence[Part], ranks: int) -> list[range]:
    """Return the numbers of the experts that each rank has, of parts whose experts are dealt whole."""
    spans = []
    for rank in range(ranks):
        of = parts_of_rank(len(parts), rank, ranks)
        first, last = parts[of[0]].experts, parts[of[-1]].experts
        assert first is not None
        assert last is not None
        spans.append(range(first.start, last.stop))
    return spans


def repeats_keys(parts: Sequence[Part], number: int) -> bool:
    """Return whether the part before has the same KV head."""
    return number > 0 and parts[number - 1].kv_heads == parts[number].kv_heads


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
