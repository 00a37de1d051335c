"""Recorded prompt steps: padding, prefixes, memories that come and go, aborts; on a GPU with CUDA graphs.

In Triton's interpreter a recording is the same padded launch, done anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.backends.triton.cuda_graph import EagerCapture
from diptych.engine.backends.triton.prompt_graphs import PromptGraphs, token_buckets
from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.models.shape import ModelShape
from diptych.engine.sampling import Sampled, SampleRow, SamplingParams, sample
from kernels.gpu.launch import INTERPRETED
from lab.gpu.random_model import random_weights
from tests.kernels.cpu.tiny_models import Pool, layout_of, shape_of, tokens_of, weights_of

TOKENS = 32
SIZES: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
    "intermediate_size": 48, "max_context": 128,
}  # fmt: skip
SHAPE = shape_of(**SIZES)
WINDOWED = shape_of(**SIZES, windows=(None, 19), qk_norm="head")


def pool_on(device: torch.device, shape: ModelShape = SHAPE, seed: int = 0, blocks: int = 24) -> Pool:
    pool = Pool(layout_of(shape, 16, torch.float32), blocks, seed=seed)
    if device.type == "cuda":
        pool.memory = KVMemory.on_device(pool.layout, blocks, device)
    else:  # aligned as memory of a device, and mappings, are
        pool.memory = KVMemory(pool.layout, blocks)
    pool.memory.data.fill_(torch.nan)
    return pool


@cache
def make(
    device: torch.device, shape: ModelShape = SHAPE, *, recorded: bool, eager_capture: bool = False
) -> TritonBackend:
    backend = TritonBackend(shape, weights_of(shape, torch.float32), device)
    if recorded:
        layout = layout_of(shape, 16, torch.float32)
        capture = EagerCapture() if eager_capture else None
        count = backend.record_prompts(layout, TOKENS, capture, seconds=math.inf)
        assert count == 2 * len(token_buckets(TOKENS))
    return backend


def replays(backend: TritonBackend, steps: list[SequenceStep]) -> bool:
    assert backend._prompts is not None
    return backend._prompts.accepts(steps)


Batch = list[tuple[int, int]]
BATCHES: list[Batch] = [[(0, 21)], [(0, 5), (1, 16)], [(2, 1)], [(1, 30)], [(0, 3), (2, 17), (1, 1)]]
"""Steps of (sequence, tokens): prefixes are computed by earlier ones."""


def run(
    backend: TritonBackend, pool: Pool, *, replayed: bool, batches: Sequence[Batch] = BATCHES
) -> list[torch.Tensor]:
    sequences = [pool.sequence(64) for _ in range(3)]
    results = []
    for number, batch in enumerate(batches):
        steps = [sequences[s].step(tokens_of(n, 67, seed=10 * number + s)) for s, n in batch]
        if replayed:
            assert replays(backend, steps)
        results.append(backend.forward(steps, None))
    return results


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(SHAPE, id="plain"),
        pytest.param(WINDOWED, id="windows and norms of heads", marks=pytest.mark.full),
    ],
)
def test_recorded_steps_equal_eager_ones(shape: ModelShape, device: torch.device) -> None:
    """Logits, greedy tokens and what is in the blocks; and what is in no sequence's block stays as it was."""
    ours, theirs = pool_on(device, shape), pool_on(device, shape)
    got = run(make(device, shape, recorded=True), ours, replayed=True)
    expected = run(make(device, shape, recorded=False), theirs, replayed=False)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)
        assert torch.equal(one.argmax(-1), other.argmax(-1))
        assert not torch.equal(one.roll(1, -1).argmax(-1), other.argmax(-1))  # the comparison can fail
    assert torch.equal(ours.memory.data.isnan(), theirs.memory.data.isnan())
    torch.testing.assert_close(ours.memory.data, theirs.memory.data, atol=2e-5, rtol=0, equal_nan=True)


@pytest.mark.gpu
def test_a_graph_has_the_bits_of_the_same_launch_without_it() -> None:
    if not torch.cuda.is_available() or INTERPRETED:
        pytest.skip("no CUDA device, or Triton is in its interpreter")
    device = torch.device("cuda:0")
    ours, theirs = pool_on(device), pool_on(device)
    got = run(make(device, recorded=True), ours, replayed=True)
    expected = run(make(device, recorded=True, eager_capture=True), theirs, replayed=True)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert torch.equal(ours.memory.blocks, theirs.memory.blocks)


def test_one_recording_serves_a_memory_that_comes_after_another_has_gone(device: torch.device) -> None:
    backend = make(device, recorded=True)
    first = pool_on(device)
    expected = run(backend, first, replayed=True, batches=BATCHES[:2])
    kept = first.memory.data.clone()
    second = pool_on(device, blocks=48)
    assert second.memory.address != first.memory.address
    first.memory.data.fill_(torch.nan)
    got = run(backend, second, replayed=True, batches=BATCHES[:2])
    assert bool(first.memory.data.isnan().all()), "nothing is written where the earlier memory was"
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert torch.equal(sorted_numbers(second.memory.data), sorted_numbers(kept))
    del first
    third = pool_on(device)
    again = run(backend, third, replayed=True, batches=BATCHES[:2])
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def sorted_numbers(data: torch.Tensor) -> torch.Tensor:
    return data[~data.isnan()].sort().values


def test_sampled_tokens_are_those_of_sampling_on_the_host(device: torch.device) -> None:
    pool, backend = pool_on(device), make(device, recorded=True)
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.3, top_k=7, seed=11)]
    rows = [SampleRow(one, (), ()) for one in params]
    steps = [pool.sequence(32).step(tokens_of(n, 67, seed=n)) for n in (9, 4, 7)]
    logits = backend.forward(steps, None)  # computing a step twice is safe
    drawn = backend.forward_and_sample(steps, [rows[0], None, rows[1]], None)
    assert torch.equal(drawn.logits, logits[1:2])
    assert [one for one in drawn.tokens if isinstance(one, Sampled)] == sample(logits[[0, 2]], rows)
    alone = backend.forward_and_sample(steps[:1], [rows[0]], None)
    assert alone.tokens == drawn.tokens[:1]


def test_several_rows_of_logits_and_none(device: torch.device) -> None:
    pool, backend = pool_on(device), make(device, recorded=True)
    first, second = pool.sequence(32), pool.sequence(32)
    ids = tokens_of(12, 67)
    trailing = backend.forward([first.step(ids, trailing=3)], None)
    assert len(backend.forward([second.step(ids[:10], wants_logits=False)], None)) == 0
    for row, token in enumerate(ids[10:], start=1):
        single = backend.forward([second.step([token])], None)
        torch.testing.assert_close(single, trailing[row : row + 1], atol=2e-5, rtol=0)


def test_an_aborted_sequence_writes_nothing_and_its_neighbour_is_unharmed(device: torch.device) -> None:
    pool, backend = pool_on(device), make(device, recorded=True)
    pool.memory.data.fill_(7.0)  # what it does not write it reads
    lost, kept = pool.sequence(32), pool.sequence(32)
    steps = [lost.step(tokens_of(9, 67)), kept.step(tokens_of(11, 67, seed=2))]
    expected = backend.forward(steps[1:], None)
    abort = AbortWords(2)
    abort.abort(0)
    got = backend.forward(steps, abort)
    assert bool(got[0].isnan().all())
    torch.testing.assert_close(got[1:], expected, atol=2e-5, rtol=0)
    assert bool((pool.memory.data[lost.table] == 7.0).all())


def test_steps_that_were_not_recorded_are_eager(device: torch.device) -> None:
    pool, backend = pool_on(device), make(device, recorded=True)
    ids = tokens_of(TOKENS + 1, 67)
    other = Pool(layout_of(SHAPE, 32, torch.float32), 8)
    table = list(range(8))
    refused = {
        "too many tokens": [pool.sequence(48).step(ids)],
        "too many sequences": [pool.sequence(16).step(ids[:1]) for _ in range(9)],
        "another block size": [other.sequence(32).step(ids[:4])],
        "two memories": [pool.sequence(16).step(ids[:4]), pool_on(device).sequence(16).step(ids[:4])],
        "a tree": [SequenceStep(pool.memory, table, 0, ids[:2], True, parents=[-1, -1])],
        "an adapter": [SequenceStep(pool.memory, table, 0, ids[:2], True, adapter=0)],
        "beyond the context": [SequenceStep(pool.memory, table, 120, ids[:9], True)],
    }
    assert replays(backend, [SequenceStep(pool.memory, table, 119, ids[:9], True)])
    assert [name for name, steps in refused.items() if replays(backend, steps)] == []


def test_what_takes_too_long_to_record_stays_eager(device: torch.device) -> None:
    backend = make(device, recorded=False)
    graphs = PromptGraphs(backend._layers, layout_of(SHAPE, 16, torch.float32), TOKENS)
    graphs.record(seconds=-1.0)
    assert graphs.count == 0
    assert not graphs.accepts([pool_on(device).sequence(16).step([1, 2])])
    assert backend.record_prompts(layout_of(SHAPE, 16, torch.float32), 0) == 0


@pytest.mark.gpu
def test_an_abort_reaches_a_step_that_is_on_its_way() -> None:
    """The word is set once everything is queued: no layer writes anything all the same.

    How soon the word arrives has no bound on a busy machine. So the device is kept busy before the layers,
    longer each time, until it arrives; a word that comes too late still makes the logits NaN.
    """
    if not torch.cuda.is_available() or INTERPRETED:
        pytest.skip("no CUDA device, or Triton is in its interpreter")
    device = torch.device("cuda:0")
    shape = shape_of(**SIZES | {"max_context": 1024})
    backend = TritonBackend(shape, random_weights(shape, device, torch.bfloat16), device)
    layout = layout_of(shape, 16, torch.bfloat16)
    assert backend.record_prompts(layout, 512) > 0
    graphs = backend._prompts
    assert graphs is not None
    memory = KVMemory.on_device(layout, 32, device)
    step = SequenceStep(memory, range(32), 0, tokens_of(512, 67), True)
    key = graphs._key([step])
    recorded, launch = graphs._recorded[key], graphs.launch

    def untouched_after(abort: AbortWords, cycles: int, *, late: bool) -> bool:
        def after_a_while() -> None:
            torch.cuda._sleep(cycles)
            recorded.replay()

        def launch_and_abort(*args: Any) -> Any:
            launched = launch(*args)
            if late:
                abort.abort(0)
            return launched

        graphs._recorded[key] = replace(recorded, replay=after_a_while)
        graphs.launch = launch_and_abort  # type: ignore[method-assign]
        memory.data.fill_(7.0)
        logits = backend.forward([step], abort)
        assert bool(logits.isnan().all()) == late
        return bool((memory.data == 7.0).all())

    assert not untouched_after(AbortWords(1), 1_000_000, late=False)
    assert any(untouched_after(AbortWords(1), 100_000_000 << doubled, late=True) for doubled in range(7))
