"""Layers with a window in blocks of their own: the numbers are those of one block for all layers.

Prompts are computed by a ring, answers give up what lies behind the window. What is given up is filled with
NaN at once, so that a read of it shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from diptych.engine.backend import Backend
from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.batch import BatchError, SequenceStep, check_batch
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.kv.window_groups import WindowGroups, window_groups
from diptych.engine.kv.window_table import PromptWindow, WindowTable
from diptych.engine.models.shape import ModelShape
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


class Windowed:
    """A sequence whose windowed blocks go by the ring, and from then on as they are read no more."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, chunk: int) -> None:
        groups = window_groups(shape.windows)
        assert groups is not None
        self.groups: WindowGroups = groups
        layout: KVLayout = replace(layout_of(shape, SIZE, dtype), windows=groups)
        self.memory, self.pool = KVMemory(layout, 90), BlockPool(90)
        self.memory.data.fill_(float("nan"))
        self.full = self.pool.allocate(layout.blocks_for(TOKENS))
        places = layout.blocks_for(TOKENS)
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
        first, end = self.groups.first_kept(TOKENS - 1, SIZE), self.memory.layout.blocks_for(TOKENS)
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


def plain_steps(shape: ModelShape, dtype: torch.dtype) -> KVMemory:
    memory = KVMemory(layout_of(shape, SIZE, dtype), -(-(TOKENS + ANSWER) // SIZE))
    memory.data.fill_(float("nan"))
    return memory


def run(
    backend: Backend, shape: ModelShape, dtype: torch.dtype, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of all steps, with one block for all layers and with blocks of their own."""
    tokens = torch.randint(
        0, shape.vocab_size, (TOKENS + ANSWER,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    memory, windowed = plain_steps(shape, dtype), Windowed(shape, dtype, chunk)
    table = range(memory.num_blocks)
    plain, own = [], []
    for start in range(0, TOKENS, chunk):
        part = tokens[start : min(start + chunk, TOKENS)]
        step = windowed.chunk(start, part)
        check_batch([step], shape.vocab_size)
        own.append(backend.forward([step], None).clone())
        plain.append(backend.forward([SequenceStep(memory, table, start, part, True)], None).clone())
    windowed.begin_answer()
    for position in range(TOKENS, TOKENS + ANSWER):
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


def test_a_ring_one_place_too_short_gives_other_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the ring is as long as it has to be."""
    monkeypatch.setattr(WindowGroups, "span", lambda self, chunk, size: (self.window + chunk - 2) // size)
    shape = shape_of(windows=GEMMA)
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
