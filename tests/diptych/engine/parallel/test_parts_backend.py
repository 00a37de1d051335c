"""The parts of a model give what the whole gives, and every degree the same bits.

Ranks are threads here. Real processes are in tests/end_to_end/test_tensor_parallel.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.parallel.parts import deal_parts
from diptych.engine.parallel.stop_word import StopWord
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.reader import OpenCheckpoint
from tests.diptych.engine.models.family_models import CASES, config_of, oracle_of, save, text_of
from tests.diptych.engine.parallel.part_checks import (
    EXACT,
    TEXT,
    check_family,
    check_layers,
    check_next_heads,
    check_other_degree,
    check_other_sums,
    check_own_heads,
    next_heads,
    stopped,
)
from tests.diptych.engine.parallel.thread_ranks import ThreadGroup, memory_of

SAMPLE = frozenset({"gemma2", "seed-oss", "starcoder2", "phi3-longrope", "cohere2", "granite"})
"""Cases of every kind of switch that parts meet: caps, norms, biases, fused matrices, one norm for both."""
IN_PARTS = sorted(CASES)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> OpenCheckpoint:
    """Six query heads, three KV heads."""
    folder = save(oracle_of(config_of("smollm3")), tmp_path_factory.mktemp("m"))
    return open_checkpoint(folder, "fp32")


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.full) for n in IN_PARTS]
)
def test_parts_of_every_family_give_the_whole_and_every_degree_the_same_bits(
    case: str, tmp_path: Path
) -> None:
    check_family(case, tmp_path, ThreadGroup)


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2), (3, 1), (2, 3), (6, 2)])
def test_any_degree_goes_on_from_the_blocks_of_any_other(
    llama: OpenCheckpoint, tmp_path: Path, prefill: int, decode: int, dtype: str
) -> None:
    if dtype == "bf16":
        folder = save(oracle_of(config_of("smollm3")), tmp_path)
        llama = open_checkpoint(folder, "bf16")
    kept = memory_of(llama.shape, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    check_other_degree(partial(ThreadGroup, llama), kept, prefill, decode)


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_a_rank_writes_its_heads_of_every_block_and_no_others(llama: OpenCheckpoint, ranks: int) -> None:
    """Each rank has a memory of its own here: what it wrote is the common pool, cut by index."""
    text = text_of(TEXT)
    pool = memory_of(llama.shape)
    ThreadGroup(llama, 6, 1).step(pool, 0, text)
    group = ThreadGroup(llama, 6, ranks)
    own = [group.memory() for _ in range(ranks)]
    group.step(own, 0, text)
    check_own_heads(group.parts, own, pool)


def test_heads_that_are_off_by_one_give_other_text(llama: OpenCheckpoint) -> None:
    """The control: parts that read the next KV head of the blocks give other logits and other tokens."""
    shifted = ThreadGroup(llama, 3, 3, dealt=next_heads(deal_parts(llama.shape, 3)))
    check_next_heads(partial(ThreadGroup, llama), shifted)


def test_parts_that_are_added_in_another_order_give_other_bits(llama: OpenCheckpoint) -> None:
    """The control of the bits: other parts are another sum."""
    check_other_sums(ThreadGroup(llama, 2, 1), ThreadGroup(llama, 3, 1))


def test_rows_of_several_sequences_are_those_of_each_alone(llama: OpenCheckpoint) -> None:
    group = ThreadGroup(llama, 3, 1)
    memory = group.memory(16)
    texts = [text_of(40, seed=1), text_of(25, seed=2)]
    tables = [range(4), range(4, 8)]
    steps = [SequenceStep(memory, t, 0, text, True) for t, text in zip(tables, texts, strict=True)]
    together = group.backends[0].forward(steps, None)
    apart = [group.step(group.memory(), 0, text)[0] for text in texts]
    assert (together - torch.stack(apart)).abs().max() < EXACT


def test_an_aborted_step_ends_within_a_layer_and_one_row_of_two_is_no_number(llama: OpenCheckpoint) -> None:
    group = ThreadGroup(llama, 2, 1)
    memory = group.memory(16)
    steps = [SequenceStep(memory, range(at, at + 4), 0, text_of(20), True) for at in (0, 4)]
    words = AbortWords(2)
    words.abort(1)
    logits = group.backends[0].forward(steps, words)
    assert torch.isfinite(logits[0]).all()
    assert logits[1].isnan().all()
    words.abort(0)
    before = memory.data[8:].clone()
    later = [SequenceStep(memory, range(at, at + 4), 0, text_of(20), True) for at in (8, 12)]
    assert group.backends[0].forward(later, words).isnan().all()
    assert memory.data[8:, 0].any(), "the first layer was begun"
    assert torch.equal(memory.data[8:, 1:], before[:, 1:])
    assert torch.isfinite(group.backends[0].forward(later, None)).all(), "the word is for one step"


@pytest.mark.parametrize(("on_device", "written"), [(True, 4), (False, 1)])
def test_ranks_that_exchange_on_the_device_compute_a_step_to_its_end(
    llama: OpenCheckpoint, on_device: bool, written: int
) -> None:
    """Their hosts may be at any layer when rank 0 stops one: they would wait for one another for ever."""
    check_layers(stopped(ThreadGroup(llama, 2, 2, on_device=on_device)), written)


def test_ranks_see_the_word_before_the_same_layer() -> None:
    fd = StopWord.file()
    ours, theirs = StopWord(fd), StopWord(fd)
    ours.reset()
    assert not theirs.stops(1000)
    ours.stop_before(4)
    ours.stop_before(5)
    assert not theirs.stops(3)
    assert theirs.stops(4)
    assert theirs.stops(5)
    ours.reset()
    assert not theirs.stops(5)
