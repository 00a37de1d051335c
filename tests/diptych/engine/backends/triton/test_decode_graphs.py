"""Recorded decode steps over static buffers: buckets, padding, tables that grow, tokens drawn where they are.

On the CPU a recording is a plain call on the same buffers, so that all but the capture is what runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest
import torch

from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.backends.triton.cuda_graph import CaptureFailed, EagerCapture, Work
from diptych.engine.backends.triton.decode_graphs import batch_buckets
from diptych.engine.batch import AbortWords, Launched, SequenceStep, StepOutput, can_sample_on_device
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.sampling import Sampled, SampleFailure, SampleRow, SamplingParams, sample
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.kernels.cpu.tiny_models import Pool, Sequenced, layout_of, shape_of, tokens_of, weights_of


class FailingCapture(EagerCapture):
    """Capture in which the recordings of these numbers, counted from 0, fail behind their work."""

    def __init__(self, failing: Collection[int], error: type[Exception] = CaptureFailed) -> None:
        self._failing, self._error, self._count = failing, error, 0

    def capture(self, work: Work) -> Work:
        work()
        self._count += 1
        if self._count - 1 in self._failing:
            raise self._error("the pool of the graphs is full")
        return work


SHAPE = shape_of(max_context=200)
LAYOUT = layout_of(SHAPE, 16, torch.float32)
GREEDY = SamplingParams(temperature=0.0)


def backend(max_batch: int | None = None, memory: KVMemory | None = None) -> TritonBackend:
    made = TritonBackend(SHAPE, weights_of(SHAPE, torch.float32), "cpu", REFERENCE_OPERATORS)
    if max_batch is not None and memory is not None:
        assert made.plan_decode(max_batch, LAYOUT.block_size) == len(batch_buckets(max_batch))
        made.prepare_decode(memory)
    return made


def prefilled(runner: TritonBackend, pool: Pool, lengths: Sequence[int]) -> list[Sequenced]:
    sequences = [pool.sequence(120) for _ in lengths]
    runner.forward(
        [s.step(tokens_of(n, seed=n), False) for s, n in zip(sequences, lengths, strict=True)], None
    )
    return sequences


def test_buckets_hold_every_batch_without_much_padding() -> None:
    assert batch_buckets(1) == [1]
    assert batch_buckets(3) == [1, 2, 3]
    assert batch_buckets(20) == [1, 2, 4, 8, 16, 20]
    assert batch_buckets(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


def test_replayed_steps_equal_eager_ones_as_batches_grow_and_shrink() -> None:
    ours, theirs = Pool(LAYOUT, 40), Pool(LAYOUT, 40)
    eager, replayed = backend(), backend(5, ours.memory)
    mine, other = (prefilled(b, p, [1, 15, 16, 33, 47]) for b, p in ((replayed, ours), (eager, theirs)))
    for number, members in enumerate([[0], [4, 0, 2], [1, 2, 3, 4, 0], [3], *[[0, 1]] * 18]):
        token = [tokens_of(1, seed=100 * number + member) for member in members]
        got = replayed.forward([mine[m].step(t) for m, t in zip(members, token, strict=True)], None)
        expected = eager.forward([other[m].step(t) for m, t in zip(members, token, strict=True)], None)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
    # Padding rows wrote nowhere: what was never granted is as it was.
    assert torch.equal(ours.memory.data.isnan(), theirs.memory.data.isnan())


@pytest.mark.parametrize(("failing", "left"), [((1,), [1, 3]), ((0, 1), [1]), ((0, 1, 2), [])], ids=str)
def test_a_step_that_cannot_be_recorded_is_computed_by_a_larger_one_or_eagerly(
    failing: tuple[int, ...], left: list[int]
) -> None:
    """Let recordings of three rows, two and one fail, by their numbers, after their work was done."""
    ours, theirs = Pool(LAYOUT, 40), Pool(LAYOUT, 40)
    eager, replayed = backend(), backend()
    replayed.plan_decode(3, LAYOUT.block_size, FailingCapture(failing))
    replayed.prepare_decode(ours.memory)
    assert replayed._graphs is not None
    assert sorted(recording.rows for recording in replayed._graphs._graphs) == left
    mine, other = (prefilled(b, p, [1, 15, 33]) for b, p in ((replayed, ours), (eager, theirs)))
    for number, members in enumerate([[0], [1, 0], [2, 0, 1]]):
        token = [tokens_of(1, seed=100 * number + member) for member in members]
        steps = [mine[m].step(t) for m, t in zip(members, token, strict=True)]
        assert replayed.launches(steps) == any(rows >= len(members) for rows in left)
        got = replayed.forward(steps, None)
        expected = eager.forward([other[m].step(t) for m, t in zip(members, token, strict=True)], None)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


def test_a_table_whose_blocks_were_exchanged_is_seen() -> None:
    pool = Pool(LAYOUT, 40)
    replayed = backend(2, pool.memory)
    (sequence,) = prefilled(replayed, pool, [40])
    table = sequence.table
    before = replayed.forward([SequenceStep(pool.memory, table, 40, [3], True)], None)
    fresh = pool.table(16)[0]
    pool.memory.copy_block(table[1], fresh)
    pool.memory.data[table[1]] = torch.nan
    table[1] = fresh  # in place, as copy-on-write does
    after = replayed.forward([SequenceStep(pool.memory, table, 40, [3], True)], None)
    assert torch.equal(before, after)


PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.8, seed=2**64 - 3),
    SamplingParams(temperature=1.3, top_k=7, top_p=0.9, seed=11),
    SamplingParams(temperature=1.0, min_p=0.05, seed=2**63),
]


def rows_of(number: int) -> list[SampleRow]:
    return [SampleRow(params, (), tokens_of(number, seed=9)) for params in PARAMS]


@pytest.mark.parametrize("recorded", [True, False])
def test_sampled_tokens_are_those_of_sampling_on_the_host(recorded: bool) -> None:
    pool = Pool(LAYOUT, 40)
    runner = backend(6, pool.memory) if recorded else backend()
    sequences = prefilled(runner, pool, [5, 17, 30, 8, 2])
    for number in range(6):
        steps = [s.step(tokens_of(1, seed=number)) for s in sequences]
        logits = runner.forward(steps, None)  # computing a step twice is safe
        rows = rows_of(number)
        drawn = runner.forward_and_sample(steps, [rows[0], rows[1], None, rows[2], rows[3]], None)
        assert drawn.tokens[2] is None
        assert torch.equal(drawn.logits, logits[2:3])
        assert [t for t in drawn.tokens if t is not None] == sample(logits[[0, 1, 3, 4]], rows)


@pytest.mark.parametrize("recorded", [True, False])
def test_logits_that_are_not_finite_fail_their_row_alone(recorded: bool) -> None:
    pool = Pool(LAYOUT, 40)
    runner = backend(6, pool.memory) if recorded else backend()
    broken, sound = prefilled(runner, pool, [20, 20])
    pool.memory.data[broken.table[0]] = torch.inf
    steps = [broken.step([1]), sound.step([1])]
    row = rows_of(0)[0]
    drawn = runner.forward_and_sample(steps, [row, row], None)
    assert isinstance(drawn.tokens[0], SampleFailure)
    assert isinstance(drawn.tokens[1], Sampled)
    assert drawn.logits.shape == (0, SHAPE.vocab_size)


def row_after(params: SamplingParams, output: list[int]) -> SampleRow:
    return SampleRow(params, (), output)


def test_steps_launched_ahead_sample_what_single_steps_do() -> None:
    """Rows that follow rows, in another order, beside one that joins and without one that has left."""
    ours, theirs = Pool(LAYOUT, 40), Pool(LAYOUT, 40)
    ahead, plain = backend(6, ours.memory), backend(6, theirs.memory)
    mine, other = (prefilled(b, p, [5, 15, 16, 30]) for b, p in ((ahead, ours), (plain, theirs)))
    batches = [[0, 1, 2], [2, 0, 3], [3, 2, 0], [0, 2, 3, 1], *[[3, 1, 0]] * 4]
    outputs = [[7], [8], [9], [10]]
    expected, said = [], [list(output) for output in outputs]
    for members in batches:
        steps = [other[m].step(said[m][-1:]) for m in members]
        drawn = plain.forward_and_sample(steps, [row_after(PARAMS[m], said[m]) for m in members], None)
        for member, token in zip(members, drawn.tokens, strict=True):
            assert isinstance(token, Sampled)
            said[member].append(token.token_id)
        expected.append(drawn.tokens)

    launched: Launched | None = None
    before: list[int] = []
    for number, members in enumerate([*batches, []]):
        following = None
        if members:
            steps = [
                replace(mine[m].step(outputs[m][-1:]), follows=before.index(m) if m in before else None)
                for m in members
            ]
            rows = [row_after(PARAMS[m], outputs[m]) for m in members]
            following = ahead.launch(steps, rows, None)
        if launched is not None:
            got = launched.collect()
            assert got.tokens == expected[number - 1]
            for member, token in zip(before, got.tokens, strict=True):
                assert isinstance(token, Sampled)
                outputs[member].append(token.token_id)
        launched, before = following, members
    assert outputs == said


def test_launch_refuses_what_it_cannot_take() -> None:
    pool = Pool(LAYOUT, 40)
    runner = backend(2, pool.memory)
    (sequence,) = prefilled(runner, pool, [3])
    row = rows_of(0)[0]
    assert runner.launch([sequence.step([1, 2])], [row], None) is None  # a chunk
    one, two = (runner.launch([sequence.step([1])], [row], None) for _ in range(2))
    assert one is not None
    assert two is not None
    with pytest.raises(RuntimeError, match="not collected"):
        runner.launch([sequence.step([1])], [row], None)
    one.collect()
    two.collect()
    looked_at = runner.launch([sequence.step([1])], [None], None)
    assert looked_at is not None
    with pytest.raises(RuntimeError, match="logits of the one before"):
        runner.launch([sequence.step([1])], [row], None)
    assert len(looked_at.collect().logits) == 1


def test_aborted_rows_write_nothing() -> None:
    pool = Pool(LAYOUT, 40)
    replayed = backend(4, pool.memory)
    kept, dropped = prefilled(replayed, pool, [16, 16])
    words = AbortWords(2)
    words.abort(1)
    replayed.forward([kept.step([1]), dropped.step([1])], words)
    assert pool.memory.data[kept.table[1]].isfinite().any()
    assert pool.memory.data[dropped.table[1]].isnan().all()


def test_batches_without_a_graph_run_eagerly() -> None:
    pool, elsewhere = Pool(LAYOUT, 40), Pool(LAYOUT, 40)
    replayed, eager = backend(2, pool.memory), backend()
    for steps in (
        [elsewhere.sequence(30).step(tokens_of(1))],  # another memory
        [pool.sequence(30).step(tokens_of(4))],  # a chunk
        [pool.sequence(30).step(tokens_of(1, seed=n)) for n in range(3)],  # more rows than planned
    ):
        torch.testing.assert_close(
            replayed.forward(steps, None), eager.forward(steps, None), atol=1e-5, rtol=0
        )


def test_only_rows_without_processors_are_sampled_on_the_device() -> None:
    plain = SampleRow(SamplingParams(temperature=0.5, top_k=3), (), ())
    assert can_sample_on_device(plain) is plain
    for row in (
        SampleRow(SamplingParams(logprobs=0), (), ()),
        SampleRow(SamplingParams(repetition_penalty=1.2), (), ()),
        SampleRow(SamplingParams(top_n_sigma=1.0), (), ()),
        SampleRow(SamplingParams(), (), (), suppress=(2,)),
    ):
        assert can_sample_on_device(row) is None
    assert StepOutput.logits_only(torch.zeros(2, 5)).tokens == [None, None]
