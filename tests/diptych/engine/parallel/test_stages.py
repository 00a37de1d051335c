"""Layers dealt to stages: the bits of one process with the same parts, and each stage's keys in its layers.

Processes are threads here. Real ones are in tests/end_to_end/test_expert_parallel.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.parallel.stages import Grid, Stage, deal_stages
from diptych.engine.parallel.ways import ways_of
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.reader import OpenCheckpoint
from tests.diptych.engine.models import expert_models
from tests.diptych.engine.models.family_models import config_of, oracle_of, save, text_of
from tests.diptych.engine.parallel.thread_ranks import ThreadGroup

TEXT, GREEDY = 60, 10


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> OpenCheckpoint:
    """Four layers that differ by turns, and an output matrix that is the embedding."""
    return open_checkpoint(save(oracle_of(config_of("gemma2")), tmp_path_factory.mktemp("m")), "fp32")


@given(ranks=st.integers(1, 5), stages=st.integers(1, 5))
def test_processes_meet_those_of_their_stage_and_of_the_next(ranks: int, stages: int) -> None:
    grid = Grid(ranks, stages)
    assert [grid.place(number) for number in range(grid.size)] == [
        (stage, rank) for stage in range(stages) for rank in range(ranks)
    ]
    for way in ways_of(grid):
        places = [grid.place(number) for number in way.members]
        if way.kind == "ranks":
            assert places == [(places[0][0], rank) for rank in range(ranks)]
        elif way.kind == "hop":
            (to, rank), (start, other) = places
            assert (to, rank) == (start + 1, other)
        else:
            assert places == [(0, 0), (stages - 1, 0)]
    kinds = [way.kind for way in ways_of(grid)]
    assert kinds.count("hop") == (stages - 1) * ranks
    assert kinds.count("ranks") == (stages if ranks > 1 else 0)


def test_more_stages_than_layers_are_refused_by_name(gemma: OpenCheckpoint) -> None:
    with pytest.raises(UnsupportedModel, match="--pipeline-parallel 5: the model has 4 layers"):
        deal_stages(gemma.shape, 5)


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [(1, 2), (2, 2), *(pytest.param(*n, marks=pytest.mark.full) for n in ((1, 4), (2, 3)))],
)
def test_stages_give_the_bits_of_one_process(gemma: OpenCheckpoint, ranks: int, stages: int) -> None:
    text = text_of(TEXT)
    alone, group = ThreadGroup(gemma, 2, 1), ThreadGroup(gemma, 2, ranks, stages=stages)
    kept, pool = alone.memory(), group.memory()
    expected, found = (
        one.step(memory, 0, text[:-1], TEXT - 1) for one, memory in ((alone, kept), (group, pool))
    )
    assert torch.equal(found, expected)
    assert torch.equal(pool.data, kept.data)
    expected_tokens, expected_logits = alone.decode(kept, text, GREEDY)
    tokens, logits = group.decode(pool, text, GREEDY)
    assert tokens == expected_tokens
    assert torch.equal(logits, expected_logits)


@pytest.mark.parametrize("case", ["mixtral", pytest.param("deepseek_v3", marks=pytest.mark.full)])
def test_stages_of_experts_give_the_bits_of_one_process(case: str, tmp_path: Path) -> None:
    expert_models.oracle_of(case).save_pretrained(tmp_path)
    opened, text = open_checkpoint(tmp_path, "fp32"), list(range(TEXT))
    alone = ThreadGroup(opened, 2, 1, whole_experts=True)
    group = ThreadGroup(opened, 2, 2, stages=2, whole_experts=True)
    expected, found = (one.step(one.memory(), 0, text, TEXT) for one in (alone, group))
    assert torch.equal(found, expected)


def test_a_stage_writes_its_layers_of_every_block_and_no_others(gemma: OpenCheckpoint) -> None:
    """Each process has a memory of its own here."""
    text = text_of(TEXT)
    alone, group = ThreadGroup(gemma, 2, 1), ThreadGroup(gemma, 2, 2, stages=2)
    pool, own = alone.memory(), [group.memory() for _ in range(4)]
    alone.step(pool, 0, text)
    group.step(own, 0, text)
    for number, memory in enumerate(own):
        heads = group.parts[number % 2].kv_heads
        layers, others = (range(2), range(2, 4)) if number < 2 else (range(2, 4), range(2))
        for layer in layers:
            mine = (slice(None), layer, slice(None), slice(heads.start, heads.stop))
            assert torch.equal(memory.data[mine], pool.data[mine])
        assert not memory.data[:, list(others)].any()


def test_layers_that_are_off_by_one_give_other_text(gemma: OpenCheckpoint) -> None:
    """The control: stages that keep the keys of their layers where those of the next ones are."""
    text = text_of(TEXT)
    alone = ThreadGroup(gemma, 2, 1)
    kept = alone.memory()
    alone.step(kept, 0, text[:-1])
    wrong = [Stage(range(1, 3), 4), Stage(range(2, 4), 4)]
    group = ThreadGroup(gemma, 2, 1, stages=2, dealt_stages=wrong)
    expected = alone.decode(kept, text, GREEDY)
    found = group.decode(kept, text, GREEDY)
    assert (found[1] - expected[1]).abs().max() > 1e-2


def test_each_stage_holds_its_layers_alone(gemma: OpenCheckpoint) -> None:
    """The first has the embedding, the last the output matrix, which is the embedding of a tied model."""
    whole, stages = ThreadGroup(gemma, 1, 1), ThreadGroup(gemma, 1, 1, stages=4)
    embed = gemma.shape.vocab_size * gemma.shape.hidden_size * 4
    share = (whole.weight_bytes[0] - embed) / 4
    ends, middle = stages.weight_bytes[::3], stages.weight_bytes[1:3]
    assert max(middle) <= share * 1.1
    assert max(ends) <= share * 1.1 + embed


def test_an_aborted_step_ends_in_all_stages(gemma: OpenCheckpoint) -> None:
    """The next stage gets the rows of the step that ended, and computes none of its layers."""
    group = ThreadGroup(gemma, 2, 2, stages=2)
    memory, words = group.memory(), AbortWords(1)
    words.abort(0)
    step = [SequenceStep(memory, range(8), 0, text_of(TEXT), True)]
    with ThreadPoolExecutor(4) as threads:
        numbers = range(4)
        logits = list(
            threads.map(
                lambda number: group.backends[number].forward(step, None if number else words), numbers
            )
        )
    assert logits[0].isnan().all()
    assert memory.data[:, 0].any()
    assert not memory.data[:, 1:].any()
    text = text_of(TEXT)
    alone = ThreadGroup(gemma, 2, 1)
    assert torch.equal(group.step(memory, 0, text), alone.step(alone.memory(), 0, text))
