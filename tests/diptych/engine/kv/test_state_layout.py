"""Pages of recurrent states: where their bytes lie in blocks, and which blocks a prompt takes."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.engine.batch import BatchError, SequenceStep, check_batch
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.model_layout import kv_layout
from diptych.engine.kv.own_tables import own_blocks, own_tables
from diptych.engine.kv.state_groups import state_groups
from diptych.engine.kv.state_layout import ALIGNED, StatePages, state_layout
from diptych.engine.kv.window_table import PromptWindow
from diptych.engine.models.recurrent import ShortConvShape
from diptych.engine.models.shape import LatentShape, LayerShape, ModelShape, UnsupportedModel
from tests.kernels.cpu.tiny_models import shape_of

CONV = LayerShape(attention=False, recurrent=ShortConvShape(100, 4))


def hybrid(layers: tuple[LayerShape, ...] = (CONV, LayerShape(), CONV), **changes: object) -> ModelShape:
    return replace(shape_of(num_kv_heads=3, head_dim=8, num_heads=3), layers=layers, **changes)  # type: ignore[arg-type]


SHAPES = st.lists(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).map(
        tuple
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(
    shapes=SHAPES, block_bytes=st.integers(8, 60).map(lambda eighths: 8 * eighths), seed=st.integers(0, 99)
)
def test_a_page_keeps_each_layers_states_apart(
    shapes: list[tuple[tuple[int, ...], ...]], block_bytes: int, seed: int
) -> None:
    """Any states in blocks of any size: what was written of one page and layer is read, and nothing else."""
    generator = torch.Generator().manual_seed(seed)
    layout = state_layout(list(enumerate(shapes)), block_bytes)
    blocks = torch.zeros((3 * layout.blocks, block_bytes), dtype=torch.uint8)
    order = list(range(len(blocks)))
    random.Random(seed).shuffle(order)
    tables = torch.tensor(order).view(3, layout.blocks)
    pages, written = StatePages(layout, blocks), {}
    pages.set_counts(tables, torch.tensor([5, 1 << 40, 0]))
    for layer, sizes in enumerate(shapes):
        written[layer] = [torch.randn(3, *size, generator=generator) for size in sizes]
        pages.set_states(layer, tables, written[layer])
    pages.set_states(0, tables[1:2], [state[:1] for state in written[0]])
    assert pages.counts(tables).tolist() == [5, 1 << 40, 0]
    for layer, states in written.items():
        found = pages.states(layer, tables)
        for page in range(3):
            of = 0 if (layer, page) == (0, 1) else page
            assert all(torch.equal(one[page], other[of]) for one, other in zip(found, states, strict=True))
    extents = sorted(layout.extents().values())
    assert extents[0][0] == ALIGNED
    assert all(end <= begin for (_, end), (begin, _) in pairwise(extents))
    assert extents[-1][1] <= layout.page_bytes <= layout.blocks * layout.block_bytes


def test_a_state_without_numbers_lies_beside_others() -> None:
    """A convolution of one tap keeps no inputs, and its layer may keep a matrix."""
    layout = state_layout([(0, ((0, 5), (2, 3)))], 64)
    pages = StatePages(layout, torch.zeros(2 * layout.blocks, 64, dtype=torch.uint8))
    tables = torch.arange(2 * layout.blocks).view(2, -1)
    matrix = torch.arange(12.0).view(2, 2, 3)
    pages.set_states(0, tables, [torch.empty(2, 0, 5), matrix])
    nothing, found = pages.states(0, tables)
    assert nothing.shape == (2, 0, 5)
    assert torch.equal(found, matrix)


@pytest.mark.parametrize("block_bytes", [56, 132])
def test_blocks_that_hold_no_states_are_refused(block_bytes: int) -> None:
    with pytest.raises(ValueError, match="choose another block size"):
        state_layout([(0, ((2, 3),))], block_bytes)


def test_blocks_have_the_layers_that_attend() -> None:
    plain = kv_layout(shape_of(num_kv_heads=3, head_dim=8, num_heads=3, num_layers=1), torch.float32, 16)
    layout = kv_layout(hybrid(), torch.float32, 16)
    assert layout.bytes_per_block == plain.bytes_per_block == 3072
    assert layout.states is not None
    assert layout.windows is not None
    assert layout.windows.places == ((1, 0), (0, 0), (1, 0))
    assert layout.states.page_bytes == 64 + 2 * 1216  # 3 x 100 numbers, up to whole cache lines
    assert layout.windows.tables == layout.states.blocks == 1
    assert kv_layout(hybrid(), torch.float32, 8).blocks_per_place == 3
    assert layout.name != plain.name
    assert layout.name != kv_layout(hybrid((CONV, LayerShape())), torch.float32, 16).name


def test_what_is_not_kept_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="latents"):
        kv_layout(hybrid(latent=LatentShape(8, 4, 4), num_kv_heads=1), torch.float32, 16)
    with pytest.raises(UnsupportedModel, match="no layer attends"):
        hybrid((CONV, CONV))
    with pytest.raises(UnsupportedModel, match="neither attention nor a recurrence nor a feed-forward"):
        hybrid((LayerShape(), LayerShape(attention=False, feed_forward=False)))
    with pytest.raises(ValueError, match="blocks of a place beside its full one"):
        replace(kv_layout(hybrid(), torch.float32, 16), windows=None)


@settings(max_examples=200, deadline=None)
@given(
    block_size=st.integers(1, 9),
    tokens=st.integers(1, 120),
    cached=st.integers(0, 12),
    chunks=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    page_blocks=st.integers(1, 3),
    tail=st.integers(0, 40),
)
def test_a_prompts_ring_has_what_each_chunk_reads(
    block_size: int, tokens: int, cached: int, chunks: list[int], page_blocks: int, tail: int
) -> None:
    """An oracle of pages: content by block, written behind each chunk as a step writes it.

    Each chunk finds the states behind the token before it, and in the end the first of the last `tail` places
    has its own, and so have those that are kept behind a prompt.
    """
    groups = state_groups([False, True], page_blocks)
    cached = min(cached, (tokens - 1) // block_size)
    places = -(-tokens // block_size)
    tail = min(tail, places - cached)
    blocks = list(range(100, 100 + groups.ring_blocks(places - cached, max(chunks), block_size, tail)))
    assert len(blocks) <= 3 * page_blocks
    pinned = list(range(page_blocks)) if cached else []
    window = PromptWindow(page_blocks, pinned, groups.ring_of(blocks, places, tail), cached)
    assert sorted(window.held) == sorted([*pinned, *blocks])
    content: dict[tuple[int, ...], int] = {tuple(pinned): cached * block_size}
    start = cached * block_size
    while start < tokens:
        end = min(start + chunks[start % len(chunks)], tokens)
        first = groups.first_read(start, block_size)
        tables = window.tables_of(first, -(-end // block_size), wraps=True)
        pages = list(zip(*tables, strict=True))
        if start:
            assert content[pages[(start - 1) // block_size - first]] == start
        for place in range(start // block_size, (end - 1) // block_size + 1):
            content[pages[place - first]] = min((place + 1) * block_size, end)
        start = end
    kept = range(max(cached, groups.first_kept(tokens - 1, block_size)), places)
    there = {*kept, *([places - tail] if tail else [])}
    for place in there | set(window.lasting(cached, places)):
        assert content[tuple(window.blocks(place))] == min((place + 1) * block_size, tokens)
    assert there.issubset(window.lasting(cached, places))


@pytest.mark.parametrize("page_blocks", [1, 200])
@pytest.mark.parametrize("tail", [3, 4, 5, 68, 136, 999])
def test_what_prompts_share_takes_one_page_however_far_it_is_from_the_end(
    page_blocks: int, tail: int
) -> None:
    """Keep of the last `tail` places the first, and the two behind the prompt: no other can be hit."""
    groups = state_groups([True, False], page_blocks)
    assert groups.ring_blocks(1000, 512, 16) == 2 * page_blocks
    assert groups.ring_blocks(1000, 512, 16, tail) == 3 * page_blocks
    ring = groups.ring_of(range(3 * page_blocks), 1000, tail)
    entries = [ring[at : at + page_blocks] for at in range(0, len(ring), page_blocks)]
    at = [list(entries[place % len(entries)]) for place in range(1000)]
    parting = at[1000 - tail]
    assert parting not in at[1000 - tail + 1 :], "no later place takes it"
    assert all(one != other for one, other in itertools.pairwise(at))


def test_a_ring_without_wrapping_refuses_a_long_chunk() -> None:
    window = PromptWindow(1, [], [1, 2], 0)
    with pytest.raises(IndexError, match="do not fit"):
        window.tables_of(0, 3)
    assert window.tables_of(0, 3, wraps=True) == ((1, 2, 1),)


def test_a_step_without_pages_is_refused() -> None:
    layout = kv_layout(hybrid(), torch.float32, 16)
    memory = KVMemory(layout, own_blocks(layout, 20))
    table, pages = own_tables(layout, range(memory.num_blocks))
    assert (list(table), [list(one) for one in pages]) == ([0, 1], [[2, 3]])
    check_batch([SequenceStep(memory, table, 0, [1] * 20, True, window_tables=pages)], 131)
    for wrong in ((), ([2],), ([2, 9],)):
        with pytest.raises(BatchError):
            check_batch([SequenceStep(memory, table, 0, [1] * 20, True, window_tables=wrong)], 131)
