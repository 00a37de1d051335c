"""Greedy rows are drawn by the native step: the tokens are those that `sample` takes of the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.batch import AbortWords
from diptych.engine.models.shape import ModelShape
from diptych.engine.sampling import Sampled, SampleRow, SamplingParams, sample
from diptych.engine.sampling.sample import NOT_FINITE
from diptych.engine.weights import Weights
from kernels.cpu import library as native
from tests.forms import sampled
from tests.kernels.cpu.tiny_models import (
    Pool,
    block_weights_of,
    byte_weights_of,
    layout_of,
    shape_of,
    tokens_of,
    weights_of,
)

GREEDY = SampleRow(SamplingParams(temperature=0.0), (), ())
WARM = SampleRow(SamplingParams(temperature=0.8), (), ())
KINDS: dict[str, tuple[int, torch.dtype, Callable[[ModelShape], Weights]]] = {
    "fp32": (native.FP32, torch.float32, lambda shape: weights_of(shape, torch.float32)),
    "bf16": (native.BF16, torch.bfloat16, lambda shape: weights_of(shape, torch.bfloat16)),
    "blocks": (native.BLOCKS, torch.bfloat16, lambda shape: block_weights_of(shape, "q4_1")),
    "bytes": (native.BYTES, torch.bfloat16, byte_weights_of),
}
EVERY_SET = [(kind, name) for kind in KINDS for name in native.instruction_sets(KINDS[kind][0])]


@pytest.mark.parametrize("threads", sampled([1, 3], [3]))
@pytest.mark.parametrize("vocab_size", [2, 32, 131])
@pytest.mark.parametrize(("kind", "instructions"), EVERY_SET, ids=str)
def test_greedy_rows_come_as_tokens_and_the_others_as_logits(
    kind: str, instructions: str, vocab_size: int, threads: int
) -> None:
    shape = shape_of(vocab_size=vocab_size)
    _, dtype, weights = KINDS[kind]
    backend = NativeBackend(shape, weights(shape), dtype, instructions)
    backend.set_threads(threads)
    pool = Pool(layout_of(shape, 16, dtype), 20)
    a, b, c = (pool.sequence(40) for _ in range(3))
    steps = [
        a.step(tokens_of(14, vocab_size), trailing=14),
        b.step(tokens_of(20, vocab_size), wants_logits=False),
        c.step(tokens_of(1, vocab_size, seed=7)),
    ]
    logits = backend.forward(steps, None)
    expected = sample(logits, [GREEDY] * 15)
    draws = [GREEDY, None, WARM, GREEDY, GREEDY, None, *[GREEDY] * 9]
    left = [1, 2, 5]
    drawn = backend.forward_and_sample(steps, draws, None)
    assert drawn.tokens == [None if row in left else token for row, token in enumerate(expected)]
    several = {token.token_id for token in expected if isinstance(token, Sampled)}
    assert vocab_size == 2 or len(several) > 1
    assert torch.equal(drawn.logits, logits[left])
    everything = backend.forward_and_sample(steps, [GREEDY] * 15, None)
    assert everything.tokens == expected
    assert everything.logits.shape == (0, vocab_size)
    assert torch.equal(backend.forward_and_sample(steps, [None] * 15, None).logits, logits)


def head_of(change: Callable[[torch.Tensor, int], None]) -> tuple[NativeBackend, Pool, int]:
    """A backend whose head was changed where it is told which token would have been likeliest before."""
    shape = shape_of()
    weights = weights_of(shape, torch.float32)
    head = weights.output_matrix().clone()
    pool = Pool(layout_of(shape, 16, torch.float32), 4)
    before = NativeBackend(shape, weights, torch.float32)
    best = int(before.forward([pool.sequence(16).step([3])], None).argmax())
    change(head, best)
    return NativeBackend(shape, replace(weights, head=head), torch.float32), pool, best


@pytest.mark.parametrize("others", [(0, 130), (31, 32), (1, 2), (64, 96)])
def test_of_equal_tokens_the_first_is_taken(others: tuple[int, int]) -> None:
    def repeat(head: torch.Tensor, best: int) -> None:
        head[list(others)] = head[best].clone()

    backend, pool, best = head_of(repeat)
    drawn = backend.forward_and_sample([pool.sequence(16).step([3])], [GREEDY], None)
    assert drawn.tokens == [Sampled(min(best, *others))]


def test_where_all_are_equal_it_is_the_first() -> None:
    backend, pool, _ = head_of(lambda head, _: head.zero_())
    assert backend.forward_and_sample([pool.sequence(16).step([3])], [GREEDY], None).tokens == [Sampled(0)]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), -float("nan")])
@pytest.mark.parametrize("token", [0, 77, 130])
def test_one_logit_that_is_not_finite_fails_the_row(bad: float, token: int) -> None:
    def spoil(head: torch.Tensor, _: int) -> None:
        head[token] = bad

    backend, pool, _ = head_of(spoil)
    assert backend.forward_and_sample([pool.sequence(16).step([3])], [GREEDY], None).tokens == [NOT_FINITE]


def test_a_row_that_fails_leaves_the_others_alone() -> None:
    shape = shape_of()
    weights = weights_of(shape, torch.float32)
    weights.embed[9] = float("nan")
    backend = NativeBackend(shape, weights, torch.float32)
    pool = Pool(layout_of(shape, 16, torch.float32), 4)
    steps = [pool.sequence(16).step([token]) for token in (3, 9, 4)]
    first, second, third = backend.forward_and_sample(steps, [GREEDY] * 3, None).tokens
    assert second == NOT_FINITE
    assert [first, third] == sample(backend.forward([steps[0], steps[2]], None), [GREEDY, GREEDY])


@pytest.mark.parametrize("aborted", [[1], [0, 1]])
def test_rows_of_aborted_sequences_have_no_token(aborted: list[int]) -> None:
    shape = shape_of()
    backend = NativeBackend(shape, weights_of(shape, torch.float32), torch.float32)
    pool = Pool(layout_of(shape, 16, torch.float32), 4)
    steps = [pool.sequence(16).step([token]) for token in (3, 4)]
    expected = backend.forward_and_sample(steps, [GREEDY] * 2, None).tokens
    words = AbortWords(2)
    for number in aborted:
        words.abort(number)
    drawn = backend.forward_and_sample(steps, [GREEDY] * 2, words)
    assert drawn.tokens == [NOT_FINITE if row in aborted else expected[row] for row in range(2)]
