"""Steps over recurrent layers: those of torch, eager and recorded; pages change by whole steps alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from diptych.engine.backend import Backend
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.backends.triton.recurrent.page_buffers import PageBuffers
from diptych.engine.backends.triton.recurrent.short_conv import ShortConvMixer
from diptych.engine.backends.triton.supports import supports
from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.model_layout import kv_layout
from diptych.engine.kv.own_tables import own_blocks, own_tables
from diptych.engine.weights.checkpoint import open_checkpoint
from tests.adapters import random_adapter
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.diptych.engine.models.recurrent_models import CASES, oracle_of, save
from tests.diptych.worker_process.both_workers import RECURRENT, VOCABULARY
from tests.kernels.cpu.tiny_models import weights_of

TEXT = [(11 * n + 5) % VOCABULARY for n in range(30)]
LAYOUT = kv_layout(RECURRENT, torch.float32, 4)
BLOCKS = own_blocks(LAYOUT, len(TEXT))
PAGES = slice(BLOCKS // LAYOUT.blocks_per_place, BLOCKS)
"""Blocks of a text that are pages."""


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0.0, atol=3e-5)


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


def recorded(memory: KVMemory, rows: int = 4) -> TritonBackend:
    """Return the step with its decode steps and prompt steps recorded."""
    computes = meant()
    computes.plan_decode(rows, 4, windows=LAYOUT.windows)
    computes.prepare_decode(memory)
    assert computes.record_prompts(LAYOUT, 32, seconds=math.inf) > 0
    return computes


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("cuts", [(1,) * 30, (7, 1, 8, 14), (4, 4, 4, 18), (29, 1), (3, 27)])
def test_any_cut_of_a_text_gives_the_logits_of_torch(cuts: tuple[int, ...], replays: bool) -> None:
    memory = KVMemory(LAYOUT, BLOCKS)
    computes = recorded(memory) if replays else meant()
    text, rows, start = Text(memory), [], 0
    for count in cuts:
        step = text.step(start, start + count)
        if replays:
            assert computes._graphs is not None
            assert computes._prompts is not None
            assert computes._graphs.accepts([step]) if count == 1 else computes._prompts.accepts([step])
        rows.append(computes.forward([step], None))
        start += count
    close(torch.cat(rows), whole())


@pytest.mark.parametrize("replays", [False, True])
def test_adapted_rows_beside_others_are_those_of_torch(replays: bool) -> None:
    """The first recorded step with adapters is captured between two steps without."""
    memory, other = KVMemory(LAYOUT, 2 * BLOCKS), KVMemory(LAYOUT, 2 * BLOCKS)
    ours = recorded(memory) if replays else meant()
    theirs = TorchBackend(RECURRENT, weights_of(RECURRENT, torch.float32))
    for backend in (ours, theirs):
        assert backend.allow_adapters(2, 8) is None
        for slot in (0, 1):
            backend.set_adapter(slot, backend.prepare_adapter(random_adapter(RECURRENT, slot)))

    def logits(backend: Backend, of: KVMemory, slots: tuple[int | None, int | None]) -> list[torch.Tensor]:
        texts, rows = [Text(of, 0), Text(of, 1)], []
        for start, end in ((0, 9), (9, 10), (10, 11), (11, 20), (20, 21)):
            chosen = (None, None) if end == 10 else slots
            both = zip(texts, chosen, strict=True)
            steps = [replace(text.step(start, end), adapter=slot) for text, slot in both]
            rows.append(backend.forward(steps, None).clone())
        return rows

    expected = logits(theirs, other, (0, None))
    for found, wanted in zip(logits(ours, memory, (0, None)), expected, strict=True):
        close(found, wanted)
    assert (logits(ours, memory, (1, None))[-1] - expected[-1]).abs().max() > 1e-3


def bits(memory: KVMemory) -> torch.Tensor:
    """Return the pages of the first text of a memory."""
    return memory.blocks[PAGES].clone()


def test_pages_are_those_of_torch() -> None:
    """Let either step go on from what the other one left."""
    torch_step = TorchBackend(RECURRENT, weights_of(RECURRENT, torch.float32))
    steps: tuple[Backend, Backend] = torch_step, meant()
    texts = [Text(KVMemory(LAYOUT, BLOCKS)) for _ in range(2)]
    for ends in ((0, 9), (9, 10), (10, 23)):
        logits = [one.forward([text.step(*ends)], None) for one, text in zip(steps, texts, strict=True)]
        close(*logits)
    pages = [
        text.memory.blocks[PAGES].view(torch.float32)[:, : LAYOUT.states.block_bytes // 4]
        for text in texts
        if LAYOUT.states is not None
    ]
    close(*pages)
    crossed = [one.forward([text.step(23, 30)], None) for one, text in zip(steps, texts[::-1], strict=True)]
    close(*crossed)


@pytest.mark.parametrize("replays", [False, True])
def test_neighbours_of_a_step_keep_their_states(replays: bool) -> None:
    """Chunks and single tokens of three texts beside one another, of one memory where steps are recorded."""
    memories = (
        [KVMemory(LAYOUT, 3 * BLOCKS)] * 3 if replays else [KVMemory(LAYOUT, 3 * BLOCKS) for _ in range(2)]
    )
    memories = [memories[0], memories[0], memories[-1]]
    others = [TEXT, TEXT[::-1], [3, *TEXT[1:]]]
    texts = [
        Text(memory, number, other)
        for number, (memory, other) in enumerate(zip(memories, others, strict=True))
    ]
    computes = recorded(memories[0]) if replays else meant()
    rows = [list[torch.Tensor]() for _ in texts]
    ends = ((0, 5, 9, 10, 11, 30), (0, 1, 2, 3, 4, 30), (0, 13, 14, 15, 29, 30))
    for turn in range(5):
        steps = [text.step(end[turn], end[turn + 1]) for text, end in zip(texts, ends, strict=True)]
        counts = [len(step.token_ids) for step in steps]
        for own, found in zip(rows, computes.forward(steps, None).split(counts), strict=True):
            own.append(found)
    for own, tokens in zip(rows, others, strict=True):
        close(torch.cat(own), whole(tokens))


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("tokens", [1, 6])
def test_a_sequence_that_was_aborted_before_a_step_leaves_its_pages(tokens: int, replays: bool) -> None:
    memory = KVMemory(LAYOUT, 2 * BLOCKS)
    texts, words = [Text(memory, 0), Text(memory, 1)], AbortWords(2)
    computes = recorded(memory) if replays else meant()
    computes.forward([text.step(0, 10) for text in texts], None)
    before = bits(memory)
    words.abort(0)
    aborted = computes.forward([text.step(10, 10 + tokens) for text in texts], words)
    lost = aborted.isnan().all(dim=1).tolist()
    assert lost == [not replays or tokens > 1] * tokens + [False] * tokens
    assert torch.equal(bits(memory), before)
    close(computes.forward([texts[0].step(10, 11)], None)[0], whole()[10])
    assert computes.forward([texts[1].step(10, 11)], None).isnan().all(), "its token is in the states already"


class AbortedLater(AbortWords):
    """Words of which the first is set once they were read so often."""

    def __init__(self, count: int, reads: int) -> None:
        super().__init__(count)
        self._left = reads

    def all_aborted(self) -> bool:
        """See `AbortWords.all_aborted`, which is read before each layer."""
        self._left -= 1
        if self._left == 0:
            self.abort(0)
        return super().all_aborted()


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_a_sequence_that_is_aborted_between_layers_goes_on_nowhere(layer: int) -> None:
    memory, computes = KVMemory(LAYOUT, 2 * BLOCKS), meant()
    texts = [Text(memory, 0), Text(memory, 1)]
    computes.forward([text.step(0, 10) for text in texts], None)
    found = computes.forward([text.step(10, 16) for text in texts], AbortedLater(2, layer + 1))
    assert found.isnan().all(dim=1).tolist() == [True] * 6 + [False] * 6
    close(found[6:], whole()[10:16])
    for start in (10, 16):
        assert computes.forward([texts[0].step(start, start + 1)], None).isnan().all()
    close(computes.forward([texts[1].step(16, 17)], None)[0], whole()[16])


def test_a_step_that_fails_in_a_layer_leaves_no_page_to_go_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    text, computes = Text(KVMemory(LAYOUT, BLOCKS)), meant()
    computes.forward([text.step(0, 9)], None)
    with monkeypatch.context() as patch:
        patch.setattr(ShortConvMixer, "mix", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            computes.forward([text.step(9, 20)], None)
    assert computes.forward([text.step(9, 20)], None).isnan().all()
    # From its first token on it can be computed again.
    close(computes.forward([text.step(0, 20)], None), whole()[:20])


def fails(*given: object) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("replays", [False, True])
def test_states_of_another_length_lose_their_rows_alone(
    replays: bool, caplog: pytest.LogCaptureFixture
) -> None:
    memory = KVMemory(LAYOUT, 2 * BLOCKS)
    computes = recorded(memory) if replays else meant()
    text, other = Text(memory), Text(memory, 1)
    computes.forward([text.step(0, 9), other.step(0, 9)], None)
    for number, start in enumerate((6, 7, 10)):
        beside = other.step(9 + number, 10 + number)
        found = computes.forward([text.step(start, start + 1), beside], None)
        assert found.isnan().all(dim=1).tolist() == [True, False]
        assert "rows [0] of a step read recurrent states" in caplog.text
        caplog.clear()
        close(found[1], whole()[9 + number])
    chunk = computes.forward([text.step(10, 20), other.step(12, 20)], None)
    assert chunk.isnan().any(dim=1).tolist() == [True] * 10 + [False] * 8
    assert "rows [0] of a step read recurrent states" in caplog.text
    caplog.clear()
    assert not computes.forward([text.step(9, 10)], None).isnan().any()
    assert not caplog.text


def test_pages_of_a_recorded_step_are_laid_out_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a page that is not brought to the device is that of the step before."""
    memory = KVMemory(LAYOUT, BLOCKS)
    computes, text = recorded(memory), Text(memory)
    computes.forward([text.step(0, 7)], None)
    computes.forward([text.step(7, 8)], None)
    monkeypatch.setattr(PageBuffers, "upload", lambda *given: None)
    assert computes.forward([text.step(8, 9)], None).isnan().all()


def test_a_recorded_step_without_its_states_is_refused() -> None:
    backend = meant()
    backend.plan_decode(2, 4)
    with pytest.raises(ValueError, match="blocks of another layout"):
        backend.prepare_decode(KVMemory(LAYOUT, BLOCKS))


def test_trees_are_refused_by_name() -> None:
    assert meant().lacks_trees() == "a recurrent layer knows no trees of tokens"


FAMILIES = ["lfm2-experts"]
"""Cases of recurrent_models.py that are computed in every run."""


@pytest.mark.parametrize(
    "name", [name if name in FAMILIES else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_steps_of_a_family_give_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    folder = save(oracle_of(name), tmp_path)
    checkpoint = open_checkpoint(folder, "fp32")
    if (why := supports(checkpoint.shape)) is not None:
        pytest.skip(f"the Triton step does not compute {why}")
    oracle = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    text = [(7 * n + 3) % checkpoint.shape.vocab_size for n in range(70)]
    with torch.inference_mode():
        expected = oracle(torch.tensor([text])).logits[0]
    computes = TritonBackend(checkpoint.shape, checkpoint.read_all().weights, "cpu", REFERENCE_OPERATORS)
    layout = kv_layout(checkpoint.shape, torch.float32, 16)
    blocks = own_blocks(layout, len(text))
    memory = KVMemory(layout, blocks)
    table, pages = own_tables(layout, range(blocks))
    rows, start = [], 0
    for count in (37, 1, 1, 30, 1):
        part = text[start : start + count]
        step = SequenceStep(memory, table, start, part, True, trailing=count, window_tables=pages)
        rows.append(computes.forward([step], None))
        start += count
    torch.testing.assert_close(torch.cat(rows), expected, rtol=0.0, atol=1e-4)


# ---- the kernels themselves: in Triton's interpreter, or on a GPU ------------------------------------------


def kernels(device: torch.device) -> tuple[TritonBackend, KVMemory]:
    """Return the step with the kernels, recorded, and two texts' room on its device."""
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    computes = TritonBackend(RECURRENT, weights_of(RECURRENT, torch.float32), device)
    memory = KVMemory.on_device(LAYOUT, 2 * BLOCKS, device)
    computes.plan_decode(1 if device.type == "cpu" else 4, 4, windows=LAYOUT.windows)
    computes.prepare_decode(memory)
    assert computes.plan_prompts(LAYOUT, 8) > 0
    computes.record_prompt(0)
    return computes, memory


def test_kernels_give_the_logits_of_torch(device: torch.device) -> None:
    """A recorded prompt, one that is too long for that, chunks beside a token, and a recorded decode step."""
    computes, memory = kernels(device)
    first, second = Text(memory), Text(memory, 1, TEXT[::-1])
    expected, other = whole(), whole(TEXT[::-1])
    near = partial(torch.testing.assert_close, rtol=0.0, atol=2e-4)
    near(computes.forward([first.step(0, 7)], None), expected[:7])
    near(computes.forward([second.step(0, 20)], None), other[:20])
    both = computes.forward([first.step(7, 10), second.step(20, 21)], None)
    near(both, torch.cat([expected[7:10], other[20:21]]))
    near(computes.forward([first.step(10, 11)], None), expected[10:11])
    mixed = computes.forward([first.step(10, 12), second.step(21, 23)], None)
    assert mixed.isnan().any(dim=1).tolist() == [True] * 2 + [False] * 2, "the first text has that token"
    near(mixed[2:], other[21:23])
