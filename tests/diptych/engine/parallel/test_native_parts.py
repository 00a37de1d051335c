"""The native step in parts gives what the whole gives, and every degree the same bits.

Ranks are threads here. Real processes are in tests/end_to_end/test_native_groups.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from diptych.engine.backends.native.share import Share
from diptych.engine.backends.native.supports import supports
from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.dtype import Precision, stored_dtype
from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.parallel_model import why_not_native
from diptych.engine.sampling import SampleRow, SamplingParams
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.reader import OpenCheckpoint
from kernels.cpu import library
from tests.diptych.engine.models.family_models import CASES, config_of, oracle_of, save, text_of
from tests.diptych.engine.parallel.native_ranks import NativeGroup
from tests.diptych.engine.parallel.part_checks import (
    GREEDY,
    TEXT,
    check_family,
    check_next_heads,
    check_other_degree,
    check_own_heads,
)
from tests.diptych.engine.parallel.thread_ranks import memory_of

SAMPLE = frozenset({"gemma2", "seed-oss", "granite", "olmo2"})
"""Cases of every kind of switch that parts meet: caps, norms on both sides, over all heads, biases."""
LIKELIEST = SampleRow(SamplingParams(temperature=0.0), (), ())
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.library_path().exists(), reason="the native step was not built"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of six query heads and three KV heads."""
    return save(oracle_of(config_of("smollm3")), tmp_path_factory.mktemp("m"))


@pytest.fixture(scope="module")
def llama(folder: Path) -> OpenCheckpoint:
    return open_checkpoint(folder, "fp32")


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.full) for n in sorted(CASES)]
)
def test_parts_of_every_family_give_the_whole_and_every_degree_the_same_bits(
    case: str, tmp_path: Path
) -> None:
    check_family(case, tmp_path, NativeGroup, supports)


def test_attention_with_a_gate_is_left_to_torch(llama: OpenCheckpoint) -> None:
    """Ranks do not pack its gate; one process computes it."""
    gated = replace(llama.shape, attention_gate=True)
    assert supports(gated) is None
    assert why_not_native(llama.shape, "fp32") is None
    assert why_not_native(gated, "fp32") == "the native step does not compute attention with a gate in parts"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (1, 2),
        (2, 3),
        *(pytest.param(*both, marks=pytest.mark.full) for both in [(2, 1), (3, 1), (6, 2), (2, 6)]),
    ],
)
def test_any_degree_goes_on_from_the_blocks_of_any_other(
    folder: Path, prefill: int, decode: int, precision: Precision
) -> None:
    """Ranks that have some of a KV head's query heads, and of several KV heads (6 parts on 2 ranks)."""
    opened, dtype = open_checkpoint(folder, precision), stored_dtype(precision)
    kept = memory_of(opened.shape, dtype=dtype)
    check_other_degree(partial(NativeGroup, opened, dtype=dtype), kept, prefill, decode)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_more_ranks_than_kv_heads_give_the_bits_of_one(tmp_path: Path, precision: Precision) -> None:
    config = config_of("smollm3")
    config.num_key_value_heads = 1
    opened = open_checkpoint(save(oracle_of(config), tmp_path), precision)
    text, dtype = text_of(TEXT), stored_dtype(precision)
    groups = [NativeGroup(opened, 3, ranks, dtype) for ranks in (1, 3)]
    (alone, kept), (together, pool) = ((g.step(m, 0, text), m) for g, m in ((g, g.memory()) for g in groups))
    assert torch.equal(together, alone)
    assert torch.equal(pool.data, kept.data)


@pytest.mark.parametrize(("ranks", "stages"), [(1, 2), (2, 3)])
def test_stages_give_the_bits_of_one(llama: OpenCheckpoint, ranks: int, stages: int) -> None:
    """Four layers: two stages of two, or three of one, one and two."""
    text = text_of(TEXT)
    alone, group = NativeGroup(llama, 2, 1), NativeGroup(llama, 2, ranks, stages=stages)
    kept, pool = alone.memory(), group.memory()
    assert torch.equal(group.step(pool, 0, text[:-1], 9), alone.step(kept, 0, text[:-1], 9))
    assert torch.equal(pool.data, kept.data)
    found, expected = group.decode(pool, text, 4), alone.decode(kept, text, 4)
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])


def test_an_aborted_step_of_stages_gives_no_numbers_and_the_next_one_its_own(llama: OpenCheckpoint) -> None:
    group, alone, text = NativeGroup(llama, 2, 2, stages=2), NativeGroup(llama, 2, 1), text_of(20)
    memory, words = group.memory(16), AbortWords(1)
    words.abort(0)
    assert group.forward([SequenceStep(memory, range(8, 12), 0, text, True)], words).isnan().all()
    assert torch.equal(group.step(memory, 0, text), alone.step(alone.memory(), 0, text))


def test_a_rank_writes_its_heads_of_every_block_and_no_others(llama: OpenCheckpoint) -> None:
    """Each rank has a memory of its own here: what it wrote is the common pool, cut by index."""
    text = text_of(TEXT)
    pool = memory_of(llama.shape)
    NativeGroup(llama, 6, 1).step(pool, 0, text)
    group = NativeGroup(llama, 6, 2)
    own = [group.memory() for _ in group.backends]
    steps = [[SequenceStep(memory, range(8), 0, text, True)] for memory in own]
    group.backends[1].follow(steps[1], b"\0")
    group.backends[0].forward(steps[0], None)
    check_own_heads(group.parts, own, pool)


def test_heads_that_are_off_by_one_give_other_text(llama: OpenCheckpoint) -> None:
    """The control: parts that read the next KV head of the blocks give other logits and other tokens."""

    class Shifted(Share):
        def view_offset(self, layout: KVLayout) -> int:
            next_head = replace(self.parts[0], kv_heads=range((self.rank + 1) % 3, (self.rank + 1) % 3 + 1))
            return Share.view_offset(replace(self, parts=[next_head]), layout)

    check_next_heads(partial(NativeGroup, llama), NativeGroup(llama, 3, 3, kind=Shifted))


def test_ranks_multiply_from_the_codes_of_a_file(bundled_path: Path) -> None:
    """The bundled model in int8: steps of one row read codes, of many rows bytes of the same numbers."""
    opened, text = open_checkpoint(bundled_path, "int8"), text_of(TEXT)
    cut = replace(opened, shape=replace(opened.shape, layers=opened.shape.layers[:3]))
    alone, group = (NativeGroup(cut, 2, ranks, torch.bfloat16) for ranks in (1, 2))
    kept, pool = alone.memory(), group.memory()
    together = alone.step(kept, 0, text, 3)
    group.step(pool, 0, text[:-3])
    logits = [group.step(pool, at, text[at : at + 1]) for at in range(TEXT - 3, TEXT)]
    assert torch.equal(torch.cat(logits), together)
    assert torch.equal(pool.data, kept.data)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_other_parts_give_other_bits(folder: Path, precision: Precision) -> None:
    """The control of the bits: other parts are another sum."""
    opened, text, dtype = open_checkpoint(folder, precision), text_of(TEXT), stored_dtype(precision)
    first, second = (
        g.step(g.memory(), 0, text, len(text)) for g in (NativeGroup(opened, n, 1, dtype) for n in (2, 3))
    )
    assert not torch.equal(first, second)


def test_threads_of_a_rank_change_no_bit(llama: OpenCheckpoint) -> None:
    text = text_of(TEXT)
    one, two = (NativeGroup(llama, 2, 2, threads=threads) for threads in (1, 2))
    kept, pool = one.memory(), two.memory()
    assert torch.equal(one.step(kept, 0, text, 9), two.step(pool, 0, text, 9))
    assert torch.equal(kept.data, pool.data)
    assert torch.equal(one.decode(kept, text, 4)[1], two.decode(pool, text, 4)[1])


def test_steps_that_are_launched_ahead_follow_the_tokens_of_all_ranks(llama: OpenCheckpoint) -> None:
    """Two streams; each row's token is that of the rank whose vocabulary has it."""
    texts = [text_of(40, seed=1), text_of(25, seed=2)]
    group = NativeGroup(llama, 3, 3)
    memory, tables = group.memory(16), (range(8), range(8, 16))
    for table, text in zip(tables, texts, strict=True):
        group.forward([SequenceStep(memory, table, 0, text[:-1], False)])
    expected = []
    for text in texts:
        alone = NativeGroup(llama, 3, 1)
        kept = alone.memory()
        alone.step(kept, 0, text[:-1])
        expected.append(alone.decode(kept, text, GREEDY)[0])

    def steps(turn: int) -> list[SequenceStep]:
        return [
            SequenceStep(memory, table, len(text) - 1 + turn, [text[-1]], True, follows=row if turn else None)
            for row, (table, text) in enumerate(zip(tables, texts, strict=True))
        ]

    launched, found = [group.launch(steps(0), [LIKELIEST] * 2)], []
    for turn in range(1, GREEDY + 1):
        if turn < GREEDY:
            launched.append(group.launch(steps(turn), [LIKELIEST] * 2))
        found.append(launched.pop(0).collect().tokens)
    tokens = [[getattr(row, "token_id", None) for row in rows] for rows in zip(*found, strict=True)]
    assert tokens == expected
    assert len({token * 3 // llama.shape.vocab_size for row in expected for token in row}) > 1


def test_a_step_samples_some_rows_and_gives_the_logits_of_others(llama: OpenCheckpoint) -> None:
    texts = [text_of(20, seed=3), text_of(30, seed=4), text_of(10, seed=5)]
    group = NativeGroup(llama, 2, 2)
    memory = group.memory(16)
    steps = [SequenceStep(memory, range(4 * at, 4 * at + 4), 0, text, True) for at, text in enumerate(texts)]
    output = group.sample(steps, [None, LIKELIEST, None])
    alone = NativeGroup(llama, 2, 1)
    logits = torch.cat([alone.step(alone.memory(), 0, text) for text in texts])
    assert torch.equal(output.logits, logits[[0, 2]])
    assert [getattr(row, "token_id", None) for row in output.tokens] == [None, int(logits[1].argmax()), None]


def test_an_aborted_step_ends_for_all_ranks_before_the_same_layer(llama: OpenCheckpoint) -> None:
    group = NativeGroup(llama, 2, 2)
    memory = group.memory(16)
    steps = [SequenceStep(memory, range(at, at + 4), 0, text_of(20), True) for at in (0, 4)]
    words = AbortWords(2)
    words.abort(1)
    assert torch.isfinite(group.forward(steps, words)[0]).all()
    words.abort(0)
    later = [SequenceStep(memory, range(at, at + 4), 0, text_of(20), True) for at in (8, 12)]
    assert group.forward(later, words).isnan().all()
    assert not memory.data[8:, :, :, 0].any(), "rank 0 saw the words before it wrote anything"
    assert memory.data[8:, 0, :, 1:].any(), "rank 1 began the first layer"
    assert not memory.data[8:, 1:].any(), "and met rank 0 within it"
    expected = NativeGroup(llama, 2, 1)
    text = text_of(20)
    assert torch.equal(group.step(memory, 0, text), expected.step(expected.memory(), 0, text))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_that_ranks_norm_for_one_another_have_the_bits_of_one_rank(
    folder: Path, precision: Precision
) -> None:
    """150 rows of chunks and of decoding: logits are wanted of the first rank's and the last one's."""
    opened, dtype = open_checkpoint(folder, precision), stored_dtype(precision)
    texts = [text_of(length, seed=length) for length in (10, 60, 45, 1, 34)]
    trailing = (3, 0, 2, 1, 0)
    found = []
    for ranks, threads in ((1, 1), (3, 1), (3, 2)):
        group = NativeGroup(opened, 3, ranks, dtype, threads=threads)
        memory = group.memory(40)
        steps = [
            SequenceStep(memory, range(8 * at, 8 * at + 8), 0, text, bool(rows), max(rows, 1))
            for at, (text, rows) in enumerate(zip(texts, trailing, strict=True))
        ]
        found.append((group.forward(steps), memory.data.clone()))
    for logits, kept in found[1:]:
        assert torch.equal(logits, found[0][0])
        assert torch.equal(kept, found[0][1])


def test_an_aborted_step_of_many_rows_ends_before_any_rank_writes(llama: OpenCheckpoint) -> None:
    """Ranks that norm rows for one another meet before the first product; see the test of few rows above."""
    group, alone, text = NativeGroup(llama, 2, 2), NativeGroup(llama, 2, 1), text_of(TEXT)
    memory, words = group.memory(16), AbortWords(1)
    words.abort(0)
    assert group.forward([SequenceStep(memory, range(8, 16), 0, text, True)], words).isnan().all()
    assert not memory.data.any()
    assert torch.equal(group.step(memory, 0, text), alone.step(alone.memory(), 0, text))


def test_a_rank_holds_its_share_of_the_weights(folder: Path) -> None:
    opened = open_checkpoint(folder, "int8")
    (alone,), pair = (NativeGroup(opened, 2, n, torch.bfloat16).weight_bytes for n in (1, 2))
    assert sum(pair) < 1.05 * alone
