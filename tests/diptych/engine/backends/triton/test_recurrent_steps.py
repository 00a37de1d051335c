"""Steps over recurrent layers: those of torch, eager and recorded; pages change by whole steps alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.model_layout import kv_layout
from diptych.engine.kv.own_tables import own_blocks, own_tables
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.diptych.worker_process.both_workers import RECURRENT, VOCABULARY
from tests.kernels.cpu.tiny_models import weights_of

TEXT = [(11 * n + 5) % VOCABULARY for n in range(30)]
LAYOUT = kv_layout(RECURRENT, torch.float32, 4)
BLOCKS = own_blocks(LAYOUT, len(TEXT))
PAGES = slice(BLOCKS // LAYOUT.blocks_per_place, BLOCKS)
"""Blocks of a text that are pages."""
CLOSE = {"rtol": 0.0, "atol": 3e-5}


def meant() -> TritonBackend:
    """Return the step with the kernels' meanings."""
    return TritonBackend(RECURRENT, weights_of(RECURRENT, torch.float32), "cpu", REFERENCE_OPERATORS)


class Text:
    """A text in blocks of its own within a memory."""

    def __init__(self, memory: KVMemory, number: int = 0, tokens: Sequence[int] = TEXT) -> None:
        self.memory, self.tokens = memory, tokens
        self._table, self._pages = own_tables(LAYOUT, range(number * BLOCKS, (number + 1) * BLOCKS))

    def step(self, start: int, end: int, *, every: bool = True) -> SequenceStep:
        part = self.tokens[start:end]
        trailing = len(part) if every else 1
        return SequenceStep(
            self.memory, self._table, start, part, True, trailing=trailing, window_tables=self._pages
        )


def whole(tokens: Sequence[int] = TEXT) -> torch.Tensor:
    text = Text(KVMemory(LAYOUT, BLOCKS), tokens=tokens)
    return TorchBackend(RECURRENT, weights_of(RECURRENT, torch.float32)).forward(
        [text.step(0, len(tokens))], None
    )


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("cuts", [(1,) * 30, (7, 1, 8, 14), (4, 4, 4, 18), (29, 1), (3, 27)])
def test_any_cut_of_a_text_gives_the_logits_of_torch(cuts: tuple[int, ...], recorded: bool) -> None:
    computes, memory = meant(), KVMemory(LAYOUT, BLOCKS)
    text, rows, start = Text(memory), [], 0
    if recorded:
        computes.plan_decode(2, 4, windows=LAYOUT.windows)
        computes.prepare_decode(memory)
        assert computes.record_prompts(LAYOUT, 32, seconds=math.inf) > 0
    for count in cuts:
        step = text.step(start, start + count)
        if recorded:
            assert computes._graphs is not None
            assert computes._prompts is not None
            assert computes._graphs.accepts([step]) if count == 1 else computes._prompts.accepts([step])
        rows.append(computes.forward([step], None))
        start += count
    torch.testing.assert_close(torch.cat(rows), whole(), **CLOSE)
