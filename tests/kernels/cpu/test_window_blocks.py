"""Layers with a window in blocks of their own: the numbers are those of one block for all layers.

Prompts are computed by a ring, answers give up what lies behind the window. What is given up is filled with
NaN at once, so that a read of it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from diptych.engine.backend import Backend
from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.batch import BatchError, EmbeddingRows, SequenceStep, check_batch
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.kv.window_groups import WindowGroups, window_groups
from diptych.engine.kv.window_table import PromptWindow, WindowTable
from diptych.engine.models.shape import ModelShape
from kernels import int8_cache
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.kernels.cpu.tiny_models import layout_of, shape_of, weights_of

SIZE = 8
GEMMA = (20, 20, 20, None)
"""Three windowed blocks a place."""
PAIRS = (None, 9, None, 9)
PADDED = (None, 17, 17, None, 17)
"""A windowed block has room for a layer that there is not."""
ALL = (12, 12, 12)
"""The first layer is in full blocks, window and all."""
TOKENS, ANSWER = 61, 30
CPU = torch.device("cpu")


class Windowed:
    """A sequence whose windowed blocks go by the ring, and from then on as they are read no more."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        chunk: int,
        device: torch.device = CPU,
        tokens: int = TOKENS,
    ) -> None:
        groups = window_groups(shape.windows)
        assert groups is not None
        self.groups: WindowGroups = groups
        layout: KVLayout = replace(layout_of(shape, SIZE, dtype), windows=groups)
        self.memory, self.pool = memory_of(layout, 90, device), BlockPool(90)
        self.tokens, places = tokens, layout.blocks_for(tokens)
        self.full = self.pool.allocate(places)
        ring = self.pool.allocate(groups.ring_blocks(places, chunk, SIZE))
        self.prompt = PromptWindow(groups.tables, [], ring, 0)
        self.table: WindowTable | None = None
        self.most = len(ring)

    def chunk(self, start: int, tokens: Sequence[int]) -> SequenceStep:
        first = self.groups.first_read(start, SIZE)
        tables = self.prompt.tables_of(first, self.memory.layout.blocks_for(start + len(tokens)))
        return SequenceStep(
            self.memory, self.full, start, tokens, True, window_tables=tables, window_first=first
        )

    def begin_answer(self) -> None:
        first = self.groups.first_kept(self.tokens - 1, SIZE)
        end = self.memory.layout.blocks_for(self.tokens)
        self.table = WindowTable(first, [list(table) for table in self.prompt.tables_of(first, end)])
        self.free([block for block in self.prompt.ring if block not in self.table.blocks()])

    def free(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.memory.blocks[block].fill_(255)  # NaN in every type
        self.pool.release(blocks)

    def decode(self, position: int, token: int) -> SequenceStep:
        assert self.table is not None
        self.free(self.table.take_before(self.groups.first_kept(position, SIZE)))
        if position // SIZE == len(self.full):
            self.full += self.pool.allocate(1)
            self.table.put(position // SIZE, self.pool.allocate(self.groups.tables))
        self.most = max(self.most, len(self.table.blocks()))
        first = self.groups.first_read(position, SIZE)
        tables = self.table.cut(first)
        return SequenceStep(
            self.memory, self.full, position, [token], True, window_tables=tables, window_first=first
        )


def memory_of(layout: KVLayout, blocks: int, device: torch.device) -> KVMemory:
    """Return blocks that hold NaN."""
    memory = KVMemory(layout, blocks) if device == CPU else KVMemory.on_device(layout, blocks, device)
    memory.blocks.fill_(0xFF)
    return memory


def run(
    backend: Backend,
    shape: ModelShape,
    dtype: torch.dtype,
    chunk: int,
    prepare: Callable[[KVMemory], None] = lambda memory: None,
    device: torch.device = CPU,
    lengths: tuple[int, int] = (TOKENS, ANSWER),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of all steps, with one block for all layers and with blocks of their own.

    `dtype` is that of keys and values; `prepare` gets the memory of the latter before the first step;
    `lengths` are tokens of the prompt and of the answer.
    """
    prompt, end = lengths[0], sum(lengths)
    tokens = torch.randint(0, shape.vocab_size, (end,), generator=torch.Generator().manual_seed(1)).tolist()
    windowed = Windowed(shape, dtype, chunk, device, prompt)
    memory = memory_of(layout_of(shape, SIZE, dtype), -(-end // SIZE), device)
    prepare(windowed.memory)
    table = range(memory.num_blocks)
    plain, own = [], []
    for start in range(0, prompt, chunk):
        part = tokens[start : min(start + chunk, prompt)]
        step = windowed.chunk(start, part)
        check_batch([step], shape.vocab_size)
        own.append(backend.forward([step], None).clone())
        plain.append(backend.forward([SequenceStep(memory, table, start, part, True)], None).clone())
    windowed.begin_answer()
    for position in range(prompt, end):
        step = windowed.decode(position, tokens[position])
        check_batch([step], shape.vocab_size)
        own.append(backend.forward([step], None).clone())
        plain.append(
            backend.forward(
                [SequenceStep(memory, table, position, tokens[position : position + 1], True)], None
            ).clone()
        )
    groups = windowed.groups
    assert windowed.most <= groups.tables * groups.span(chunk, SIZE)
    return torch.cat(plain), torch.cat(own)


@pytest.mark.parametrize("windows", [GEMMA, PAIRS, PADDED, ALL])
@pytest.mark.parametrize("chunk", [5, 61])
def test_torch_logits_equal_those_of_one_block_for_all_layers(
    windows: tuple[int | None, ...], chunk: int
) -> None:
    shape = shape_of(windows=windows)
    plain, own = run(TorchBackend(shape, weights_of(shape, torch.float32)), shape, torch.float32, chunk)
    assert torch.isfinite(plain).all()
    torch.testing.assert_close(own, plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("windows", [GEMMA, PAIRS, PADDED, ALL])
@pytest.mark.parametrize("chunk", [5, 16])
def test_native_logits_have_the_bits_of_one_block_for_all_layers(
    windows: tuple[int | None, ...], chunk: int, dtype: torch.dtype
) -> None:
    shape = shape_of(windows=windows)
    backend = NativeBackend(shape, weights_of(shape, dtype), dtype)
    plain, own = run(backend, shape, dtype, chunk)
    assert torch.isfinite(plain).all()
    assert torch.equal(own, plain)


@pytest.mark.parametrize("windows", [GEMMA, PADDED])
def test_int8_blocks_have_the_bits_of_one_block_for_all_layers(windows: tuple[int | None, ...]) -> None:
    shape = shape_of(windows=windows)
    backend = NativeBackend(shape, weights_of(shape, torch.float32), torch.float32, kept=int8_cache.DTYPE)
    plain, own = run(backend, shape, int8_cache.DTYPE, 16)
    assert torch.isfinite(plain).all()
    assert torch.equal(own, plain)


@pytest.mark.parametrize("windows", [GEMMA, PADDED])
def test_fp8_blocks_have_the_scales_of_their_layers(windows: tuple[int | None, ...]) -> None:
    shape = shape_of(windows=windows)
    scales = torch.rand(len(windows), 2, shape.num_kv_heads, generator=torch.Generator().manual_seed(2))
    backend = TorchBackend(shape, weights_of(shape, torch.float32), scales * 0.05 + 0.01)
    plain, own = run(backend, shape, torch.float8_e4m3fn, 16)
    assert torch.isfinite(plain).all()
    torch.testing.assert_close(own, plain, atol=1e-5, rtol=0)


def native(shape: ModelShape) -> Backend:
    return NativeBackend(shape, weights_of(shape, torch.float32), torch.float32)


def triton(shape: ModelShape) -> Backend:
    return TritonBackend(shape, weights_of(shape, torch.float32), "cpu", REFERENCE_OPERATORS)


@pytest.mark.parametrize("make", [native, triton])
def test_rows_of_images_see_one_another_in_windowed_blocks(make: Callable[[ModelShape], Backend]) -> None:
    """The second image is longer than the window, and its chunk longer than others."""
    shape = shape_of(windows=(9, 9, 9, None))
    rows = torch.randn(24, shape.hidden_size, generator=torch.Generator().manual_seed(5))
    backend, windowed = make(shape), Windowed(shape, torch.float32, 24)
    memory, blind = (memory_of(layout_of(shape, SIZE, torch.float32), 9, CPU) for _ in range(2))
    for start, count, images in [(0, 16, [(3, 7)]), (16, 24, [(0, 24)]), (40, 9, [])]:
        given = [EmbeddingRows(at, rows[:length], whole=True) for at, length in images]
        step = replace(windowed.chunk(start, range(count)), embeddings=given)
        plain = SequenceStep(memory, range(9), start, range(count), True, embeddings=given)
        own, expected = (backend.forward([one], None).clone() for one in (step, plain))
        torch.testing.assert_close(own, expected, atol=2e-5, rtol=0)
        one_way = [replace(one, whole=False) for one in given]
        other = backend.forward([replace(plain, memory=blind, embeddings=one_way)], None)
        assert (other - expected).abs().max() > 1e-3, "it matters that they see one another"


def test_a_chunk_longer_than_the_ring_is_an_error() -> None:
    windowed = Windowed(shape_of(windows=GEMMA), torch.float32, 8)
    with pytest.raises(IndexError, match="places 0 to 8 do not fit into a ring of 15 blocks"):
        windowed.chunk(0, range(61))


def unchecked(window: PromptWindow, first: int, end: int) -> tuple[tuple[int, ...], ...]:
    places = [window.blocks(place) for place in range(first, end)]
    return tuple(tuple(blocks[table] for blocks in places) for table in range(window.tables))


def test_a_ring_one_place_too_short_gives_other_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the ring is as long as it has to be."""
    monkeypatch.setattr(WindowGroups, "span", lambda self, chunk, size: (self.window + chunk - 2) // size)
    shape = shape_of(windows=GEMMA)
    monkeypatch.setattr(PromptWindow, "tables_of", unchecked)
    plain, own = run(TorchBackend(shape, weights_of(shape, torch.float32)), shape, torch.float32, 16)
    assert not torch.allclose(own, plain, atol=1e-3)


def test_a_step_that_reads_before_its_windowed_blocks_is_refused() -> None:
    shape = shape_of(windows=GEMMA)
    windowed = Windowed(shape, torch.float32, 16)
    step = windowed.chunk(32, [1, 2])
    late = replace(step, window_first=step.window_first + 1)
    with pytest.raises(BatchError, match="row 0: reads blocks of its window before place 2"):
        check_batch([late], shape.vocab_size)
    with pytest.raises(BatchError, match="0 tables of layers with a window"):
        check_batch([replace(step, window_tables=())], shape.vocab_size)
