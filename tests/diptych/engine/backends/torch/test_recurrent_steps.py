"""Steps over recurrent layers: states are written once, where a whole step was computed, and only then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from diptych.engine.backends.lacks import lacks_adapters, lacks_trees
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.torch.recurrent import step_states
from diptych.engine.backends.torch.recurrent.short_conv import ShortConv
from diptych.engine.backends.triton import supports as triton
from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.model_layout import kv_layout
from diptych.engine.kv.own_tables import own_blocks, own_tables
from diptych.engine.models.recurrent import ShortConvShape
from diptych.engine.models.shape import LayerShape
from tests.diptych.worker_process.both_workers import RECURRENT, VOCABULARY
from tests.kernels.cpu.tiny_models import weights_of

TEXT = [(11 * n + 5) % VOCABULARY for n in range(30)]
LAYOUT = kv_layout(RECURRENT, torch.float32, 4)
BLOCKS = own_blocks(LAYOUT, len(TEXT))


def backend() -> TorchBackend:
    return TorchBackend(RECURRENT, weights_of(RECURRENT, torch.float32))


class Text:
    """A text in blocks of its own within a memory."""

    def __init__(self, memory: KVMemory, number: int = 0, tokens: Sequence[int] = TEXT) -> None:
        self.memory, self.tokens = memory, tokens
        self._table, self._pages = own_tables(LAYOUT, range(number * BLOCKS, (number + 1) * BLOCKS))

    def step(self, start: int, end: int) -> SequenceStep:
        part = self.tokens[start:end]
        return SequenceStep(
            self.memory, self._table, start, part, True, trailing=len(part), window_tables=self._pages
        )


def whole(tokens: Sequence[int] = TEXT) -> torch.Tensor:
    return backend().forward([Text(KVMemory(LAYOUT, BLOCKS), tokens=tokens).step(0, len(tokens))], None)


@pytest.mark.parametrize("cuts", [(1,) * 30, (7, 1, 8, 14), (4, 4, 4, 18), (29, 1), (3, 27)])
def test_any_cut_of_a_text_gives_its_logits(cuts: tuple[int, ...]) -> None:
    computes, text, rows, start = backend(), Text(KVMemory(LAYOUT, BLOCKS)), [], 0
    for count in cuts:
        rows.append(computes.forward([text.step(start, start + count)], None))
        start += count
    torch.testing.assert_close(torch.cat(rows), whole(), rtol=0, atol=2e-5)


def test_neighbours_of_a_step_keep_their_states() -> None:
    """Chunks and single tokens of three texts, two of one memory, beside one another."""
    memories = KVMemory(LAYOUT, 2 * BLOCKS), KVMemory(LAYOUT, BLOCKS)
    others = [TEXT, TEXT[::-1], [3, *TEXT[1:]]]
    texts = [Text(memories[0], 0), Text(memories[0], 1, others[1]), Text(memories[1], 0, others[2])]
    computes, rows = backend(), [list[torch.Tensor]() for _ in texts]
    for ends in (((0, 5, 9, 10, 11, 30), (0, 1, 2, 3, 4, 30), (0, 13, 14, 15, 29, 30)),):
        for turn in range(5):
            steps = [text.step(end[turn], end[turn + 1]) for text, end in zip(texts, ends, strict=True)]
            counts = [len(step.token_ids) for step in steps]
            for own, found in zip(rows, computes.forward(steps, None).split(counts), strict=True):
                own.append(found)
    for own, tokens in zip(rows, others, strict=True):
        torch.testing.assert_close(torch.cat(own), whole(tokens), rtol=0, atol=2e-5)


def test_an_aborted_sequence_leaves_the_states_before_it() -> None:
    memory = KVMemory(LAYOUT, 2 * BLOCKS)
    texts, computes, words = [Text(memory, 0), Text(memory, 1)], backend(), AbortWords(2)
    computes.forward([text.step(0, 10) for text in texts], None)
    words.abort(0)
    aborted = computes.forward([text.step(10, 11) for text in texts], words)
    assert aborted.isnan().all(dim=1).tolist() == [True, False]
    torch.testing.assert_close(computes.forward([texts[0].step(10, 11)], None)[0], whole()[10])
    assert computes.forward([texts[1].step(10, 11)], None).isnan().all(), "its token is in the states already"


def test_a_step_that_fails_in_a_layer_can_be_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    text, computes = Text(KVMemory(LAYOUT, BLOCKS)), backend()
    computes.forward([text.step(0, 9)], None)
    before = text.memory.blocks[BLOCKS // 3 :].clone()  # the pages
    calls = 0

    def fail(layer: ShortConv, mixed: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of memory")
        return real(layer, mixed)

    real = ShortConv.output
    monkeypatch.setattr(ShortConv, "output", fail)
    with pytest.raises(RuntimeError):
        computes.forward([text.step(9, 20)], None)
    assert torch.equal(text.memory.blocks[BLOCKS // 3 :], before)
    torch.testing.assert_close(computes.forward([text.step(9, 20)], None), whole()[9:20], rtol=0, atol=2e-5)


def test_states_of_another_length_make_no_logits() -> None:
    text, computes = Text(KVMemory(LAYOUT, BLOCKS)), backend()
    computes.forward([text.step(0, 9)], None)
    for start in (6, 7, 10):
        assert computes.forward([text.step(start, start + 1)], None).isnan().all()
    assert not computes.forward([text.step(9, 10)], None).isnan().any()


@pytest.mark.parametrize("taps", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_convolution_has_the_same_bits_however_it_is_cut(taps: int, dtype: torch.dtype) -> None:
    torch.manual_seed(taps)
    shape = ShortConvShape(12, taps, bias=True)
    tensors = {name: torch.randn(size).to(dtype) for name, size in shape.tensors(12)}
    layer = ShortConv(tensors, torch.nn.functional.linear)
    mixed = torch.randn(3, 11, 36).to(dtype)
    start = tuple(torch.zeros(3, *size) for size in shape.states)
    expected, last = layer.advance(mixed, start)
    for cut in (1, 3, 4):
        states, parts = start, []
        for part in mixed.split(cut, dim=1):
            given, states = layer.advance(part, states)
            parts.append(given)
        assert torch.equal(torch.cat(parts, dim=1), expected)
        assert all(torch.equal(one, other) for one, other in zip(states, last, strict=True))
    alone, _ = layer.advance(mixed[1:2], tuple(state[1:2] for state in start))
    assert torch.equal(alone, expected[1:2])
    skipped, _ = layer.advance(mixed[:, 5:], start)
    assert taps == 1 or not torch.equal(skipped, expected[:, 5:])


def test_a_step_stays_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is "meta", whose tensors have no numbers: operators refuse tensors of two devices."""
    computes = TorchBackend(RECURRENT, weights_of(RECURRENT, torch.float32), device="meta")
    memory = KVMemory.on_device(LAYOUT, 2 * BLOCKS, "meta")
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor)
    monkeypatch.setattr(step_states._Run, "stale", lambda run: [False] * len(run.members))
    first, second, words = Text(memory, 0), Text(memory, 1), AbortWords(2)
    computes.forward([first.step(0, 9), second.step(0, 1)], None)
    assert computes.forward([first.step(9, 10), second.step(1, 2)], None).device.type == "meta"
    words.abort(1)
    monkeypatch.setattr(torch.Tensor, "__setitem__", lambda *given: None)  # of the aborted rows' logits
    computes.forward([first.step(10, 11), second.step(2, 3)], words)
    real = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *given, device=None, **more: real(*given, **more))
    with pytest.raises((RuntimeError, NotImplementedError), match=r"device|meta"):
        computes.forward([first.step(11, 12), second.step(3, 4)], None)


class OtherShape(ShortConvShape):
    """A kind that the Triton step does not know."""


def test_what_other_steps_lack_is_named() -> None:
    assert lacks_adapters(RECURRENT) == "adapters of recurrent layers"
    assert lacks_trees(RECURRENT) == "a recurrent layer knows no trees of tokens"
    assert triton.supports(RECURRENT) is None
    other = LayerShape(attention=False, recurrent=OtherShape(12, 3))
    assert triton.supports(replace(RECURRENT, layers=(LayerShape(), other))) == (
        "recurrent layers of short convolution"
    )
