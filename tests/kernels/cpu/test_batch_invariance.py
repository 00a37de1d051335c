"""Batch invariance: equal bits beside any neighbours, for any cut of the prompt, on any number of threads.

It is what makes a disaggregated answer equal to an aggregated one, and a resumed stream exact.
"""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.models.shape import ModelShape
from diptych.engine.weights import Weights
from kernels.cpu import library as native
from kernels.quantised_linear import BLOCK_BYTES, BlockFormat
from tests.forms import FULL, sampled
from tests.kernels.cpu.tiny_models import (
    Pool,
    block_weights_of,
    byte_weights_of,
    coded_weights_of,
    layout_of,
    shape_of,
    tokens_of,
    weights_of,
)

SHAPE = shape_of(windows=(None, 50), qk_norm="head")
EVERY_SET: list[tuple[torch.dtype | BlockFormat | Literal["bytes", "codes"], str]] = [
    *((torch.float32, name) for name in native.instruction_sets(native.FP32)),
    *((torch.bfloat16, name) for name in native.instruction_sets(native.BF16)),
    *((format, name) for format in BLOCK_BYTES for name in native.instruction_sets(native.BLOCKS)),
    *((kind, name) for kind in ("bytes", "codes") for name in native.instruction_sets(native.BYTES)),
]
KINDS = [torch.float32, torch.bfloat16, "bytes", "codes", "q4_0"]
BEST = [next(case for case in EVERY_SET if case[0] == kind) for kind in KINDS]
"""A case of each kind of numbers, with the best instructions of this machine."""
CASES = [case if case in BEST else pytest.param(case, marks=FULL) for case in EVERY_SET]
PROMPT = 530


@pytest.fixture(params=CASES, ids=str, scope="module")
def backend(request: pytest.FixtureRequest) -> NativeBackend:
    kind, instructions = request.param
    if isinstance(kind, torch.dtype):
        return NativeBackend(SHAPE, weights_of(SHAPE, kind), kind, instructions)
    return NativeBackend(SHAPE, quantised_weights_of(kind), torch.bfloat16, instructions)


def quantised_weights_of(kind: BlockFormat | Literal["bytes", "codes"]) -> Weights:
    match kind:
        case "bytes":
            return byte_weights_of(SHAPE)
        case "codes":
            return coded_weights_of(SHAPE, "q4_1")
        case _:
            return block_weights_of(SHAPE, kind)


def dtype_of(backend: NativeBackend) -> torch.dtype:
    return backend._dtype


def stored(memory: KVMemory, table: list[int]) -> torch.Tensor:
    """Return all keys and values of a sequence, as bits; NaN where nothing was written."""
    blocks = memory.data[table].contiguous()
    return blocks.view(torch.int32 if blocks.dtype == torch.float32 else torch.int16)


def prefilled(
    backend: NativeBackend, shape: ModelShape, chunk: int, threads: int, count: int = PROMPT
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after the prompt, and what was stored, with the prompt cut into chunks."""
    backend.set_threads(threads)
    sequence = Pool(layout_of(shape, 16, dtype_of(backend)), 40, seed=chunk).sequence(count)
    tokens = tokens_of(count)
    for start in range(0, count, chunk):
        logits = backend.forward([sequence.step(tokens[start : start + chunk])], None)
    return logits, stored(sequence.memory, sequence.table)


@pytest.mark.parametrize("chunk", sampled([7, 64, 1, 16, 512], [7]))
def test_chunks_and_threads_change_no_bit(backend: NativeBackend, chunk: int) -> None:
    logits, kv = prefilled(backend, SHAPE, PROMPT, threads=1)
    for threads in (1, 2, 3):
        if chunk == 1 and threads == 3:
            continue  # 530 steps on more threads than cores are slow and show nothing new
        other_logits, other_kv = prefilled(backend, SHAPE, chunk, threads)
        assert torch.equal(logits, other_logits)
        assert torch.equal(kv, other_kv)


@pytest.mark.parametrize("batch", sampled([3, 13, 2, 11, 16, 33], [13]))
def test_neighbours_change_no_bit(backend: NativeBackend, batch: int) -> None:
    prompts = [tokens_of(20 + 3 * i, seed=i) for i in range(batch)]
    layout = layout_of(SHAPE, 16, dtype_of(backend))
    backend.set_threads(1)
    alone = []
    for prompt in prompts:
        sequence = Pool(layout, 20).sequence(200)
        first = backend.forward([sequence.step(prompt)], None)
        second = backend.forward([sequence.step([5])], None)
        alone.append((first[0], second[0]))
    backend.set_threads(2)
    pool = Pool(layout, 20 * batch, seed=3)
    sequences = [pool.sequence(200) for _ in prompts]
    firsts = backend.forward([s.step(p) for s, p in zip(sequences, prompts, strict=True)], None)
    seconds = backend.forward([s.step([5]) for s in sequences], None)
    for index, (first, second) in enumerate(alone):
        assert torch.equal(firsts[index], first)
        assert torch.equal(seconds[index], second)


def test_a_decode_row_beside_a_chunk_keeps_its_bits(backend: NativeBackend) -> None:
    layout = layout_of(SHAPE, 16, dtype_of(backend))
    results = []
    for beside in (False, True):
        pool = Pool(layout, 60)
        sequence, neighbour = pool.sequence(100), pool.sequence(400)
        backend.forward([sequence.step(tokens_of(31))], None)
        batch = [neighbour.step(tokens_of(333), wants_logits=False)] if beside else []
        results.append(backend.forward([*batch, sequence.step([9])], None))
    assert torch.equal(results[0], results[1])
