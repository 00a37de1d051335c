"""Guesses in a step over recurrent layers: computed one by one, read by one another, kept nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from diptych.engine.backends.torch.recurrent.layer import make_layer
from diptych.engine.backends.torch.recurrent.step_states import StepStates
from diptych.engine.batch import BatchError, SequenceStep, check_batch
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.kv.model_layout import kv_layout
from diptych.engine.kv.own_tables import own_blocks, own_tables
from diptych.engine.kv.state_layout import StatePages
from diptych.engine.models.recurrent import RecurrentShape, ShortConvShape
from diptych.engine.models.recurrent_shapes import DeltaShape, ScanShape, SpaceShape
from diptych.engine.models.shape import LayerShape
from diptych.engine.state_cuts import page_before
from tests.diptych.worker_process.both_workers import SHAPE, VOCABULARY

SIZE, TOKENS, HIDDEN = 4, 12, SHAPE.hidden_size
STEPS = [(0, 1, 3), (1, 4, 0), (4, 5, 3), (5, 6, 3), (6, 10, 2), (10, 12, 0)]
"""Beginnings and ends of the tokens of steps, and the guesses behind them."""
KINDS: list[RecurrentShape] = [
    ShortConvShape(HIDDEN, 3),
    DeltaShape(2, 6, 8, 12, 4),
    SpaceShape(6, 9, 2, 12, 4),
    ScanShape(20, 9, 4, 3),
]


class Recurrence:
    """A recurrent layer alone, which reads the same numbers of a token in every step."""

    def __init__(self, shape: RecurrentShape) -> None:
        torch.manual_seed(4)
        layers = (LayerShape(attention=False, recurrent=shape), LayerShape())
        self.layout: KVLayout = kv_layout(replace(SHAPE, layers=layers), torch.float32, SIZE)
        tensors = {name: torch.randn(size) * 0.3 for name, size in shape.tensors(HIDDEN)}
        self._layer = make_layer(shape, tensors, functional.linear, 1e-6)
        self.mixed = self._layer.project(torch.randn(TOKENS, HIDDEN))
        self.wrong = self._layer.project(torch.randn(TOKENS, HIDDEN))
        self.text = self.new_text()

    def new_text(self) -> SequenceStep:
        blocks = own_blocks(self.layout, TOKENS)
        table, pages = own_tables(self.layout, range(blocks))
        return SequenceStep(KVMemory(self.layout, blocks), table, 0, [0], True, window_tables=pages)

    def compute(self, start: int, end: int, guesses: int, text: SequenceStep) -> torch.Tensor:
        """Return what a step gives of its tokens and of guesses, which are wrong."""
        rows = torch.cat([self.mixed[start:end], self.wrong[:guesses]])
        settled = end - start if guesses or end - start > 1 else None
        step = replace(text, start=start, token_ids=[0] * len(rows), settled=settled)
        check_batch([step], VOCABULARY)
        states = StepStates([step])
        found = states.advance(0, self._layer, rows)
        assert states.finish(None) == []
        return found[: end - start]

    def page(self, text: SequenceStep, end: int) -> tuple[int, Sequence[torch.Tensor]]:
        """Return the count and the states of the page behind `end` tokens."""
        assert self.layout.states is not None
        pages = StatePages(self.layout.states, text.memory.blocks)
        at = torch.tensor([page_before(replace(text, start=end))])
        return int(pages.counts(at)), pages.states(0, at)


@pytest.mark.parametrize("shape", KINDS, ids=lambda shape: shape.kind)
def test_states_are_those_of_tokens_one_by_one(shape: RecurrentShape) -> None:
    """Same bits, of outputs and pages, whatever was guessed; the control keeps states behind a guess."""
    recurrence = Recurrence(shape)
    guessed, single = recurrence.text, recurrence.new_text()
    for start, end, guesses in STEPS:
        found = recurrence.compute(start, end, guesses, guessed)
        expected = [recurrence.compute(at, at + 1, 0, single) for at in range(start, end)]
        assert torch.equal(found, torch.cat(expected))
        ours, theirs = recurrence.page(guessed, end), recurrence.page(single, end)
        assert ours[0] == theirs[0] == end
        assert all(torch.equal(*both) for both in zip(ours[1], theirs[1], strict=True))
    recurrence.mixed[3] = recurrence.wrong[0]
    other = recurrence.new_text()
    recurrence.compute(0, 4, 0, other)
    count, states = recurrence.page(other, 4)
    kept = recurrence.page(single, 4)
    assert count == kept[0] == 4
    assert not any(torch.equal(*both) for both in zip(states, kept[1], strict=True))


@pytest.mark.parametrize("settled", [0, 3, -1])
def test_a_step_without_tokens_that_are_no_guesses_is_refused(settled: int) -> None:
    text = Recurrence(KINDS[0]).text
    with pytest.raises(BatchError, match="are no guesses"):
        check_batch([replace(text, token_ids=[0, 1], settled=settled)], VOCABULARY)
