"""Dealing of heads, inner numbers and vocabulary: all of it, once, in groups of one size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.engine.models.shape import (
    ExpertsShape,
    LatentShape,
    LayerShape,
    ModelShape,
    Rotation,
    UnsupportedModel,
)
from diptych.engine.parallel.parts import deal, deal_parts, parts_of_rank


def shape_of(
    heads: int = 9, kv_heads: int = 3, inner: int = 100, vocab: int = 300, **more: object
) -> ModelShape:
    fields: dict[str, object] = {
        "family": "llama",
        "vocab_size": vocab,
        "hidden_size": 64,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": 16,
        "intermediate_size": inner,
        "rms_eps": 1e-5,
        "max_context": 128,
        "layers": (LayerShape(),),
        "rotations": (Rotation(10000.0, 16),),
    }
    return ModelShape(**(fields | more))  # type: ignore[arg-type]


@given(kv_heads=st.integers(1, 9), group=st.integers(1, 8), data=st.data())
def test_parts_cover_the_model_once(kv_heads: int, group: int, data: st.DataObject) -> None:
    heads = kv_heads * group
    parts = deal_parts(shape_of(heads, kv_heads), data.draw(st.integers(1, heads)))
    assert [head for part in parts for head in part.heads] == list(range(heads))
    assert [number for part in parts for number in part.inner] == list(range(100))
    assert [token for part in parts for token in part.vocab] == list(range(300))
    for part in parts:
        assert part.inner
        assert len(part.heads) % len(part.kv_heads) == 0
        of_one = len(part.heads) // len(part.kv_heads)
        assert of_one == group or len(part.kv_heads) == 1
        read = [head // group for head in part.heads]
        assert sorted(set(read)) == list(part.kv_heads)
        assert [part.kv_heads[at // of_one] for at in range(len(part.heads))] == read


def test_the_bundled_models_heads_are_dealt_unevenly_to_two_parts() -> None:
    first, second = deal_parts(shape_of(9, 3), 2)
    assert (first.heads, first.kv_heads) == (range(3), range(1))
    assert (second.heads, second.kv_heads) == (range(3, 9), range(1, 3))


@pytest.mark.parametrize("count", [2, 3, 6, 9])
@pytest.mark.parametrize("inner", [1536, 384])
def test_inner_numbers_are_dealt_evenly_unless_a_part_were_too_large(count: int, inner: int) -> None:
    """The bundled model's sizes, and a quarter of its inner numbers. No part has a tenth too much."""
    shape = shape_of(9, 3, inner=inner, hidden_size=576, head_dim=64)
    parts = deal_parts(shape, count)
    numbers = [2 * 64 * (len(part.heads) + len(part.kv_heads)) + 3 * len(part.inner) for part in parts]
    lengths = {len(part.inner) for part in parts}
    assert max(numbers) * count < 1.1 * sum(numbers)
    assert (max(lengths) - min(lengths) <= 1) == (inner == 1536 or count in (3, 9))


def test_more_parts_than_kv_heads_share_them() -> None:
    parts = deal_parts(shape_of(9, 3), 6)
    assert [part.kv_heads.start for part in parts] == [0, 0, 1, 1, 2, 2]
    assert [len(part.heads) for part in parts] == [1, 2] * 3


@given(size=st.integers(1, 1000), data=st.data())
def test_dealt_lengths_differ_by_one_at_most(size: int, data: st.DataObject) -> None:
    lengths = [len(one) for one in deal(size, data.draw(st.integers(1, size)))]
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= 1


def test_ranks_take_parts_in_a_row() -> None:
    assert [parts_of_rank(6, rank, 3) for rank in range(3)] == [range(2), range(2, 4), range(4, 6)]
    for rank, ranks in ((0, 4), (3, 3), (-1, 3), (0, 0)):
        with pytest.raises(ValueError, match="cannot be dealt"):
            parts_of_rank(6, rank, ranks)


@pytest.mark.parametrize(
    ("shape", "parts", "named"),
    [
        (shape_of(9, 3), 10, "9 query heads"),
        (shape_of(9, 3, inner=4), 5, "4 inner numbers"),
        (
            shape_of(experts=ExpertsShape(4, 2, 3), layers=(LayerShape(experts=True),)),
            4,
            "3 inner numbers of an",
        ),
        (shape_of(experts=ExpertsShape(4, 2, 8, shared_size=3)), 4, "3 inner numbers of the shared expert"),
        (shape_of(4, 1, latent=LatentShape(32, 16, 16)), 5, "4 query heads"),
    ],
)
def test_what_is_not_dealt_is_refused_by_name(shape: ModelShape, parts: int, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"--sum-parts {parts}: .*{named}"):
        deal_parts(shape, parts)
    assert len(deal_parts(shape, 1)) == 1
