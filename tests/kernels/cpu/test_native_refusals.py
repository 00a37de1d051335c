"""Refusals of the native step for batches that it must not compute, and its aborts."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

from diptych.engine.backends.native.backend import NativeBackend, NativeUnavailable
from diptych.engine.backends.native.status import NativeError
from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from kernels.byte_linear import ByteMatrix
from kernels.cpu import library as native
from tests.kernels.cpu.tiny_models import Pool, byte_weights_of, layout_of, shape_of, tokens_of, weights_of

SHAPE = shape_of()
LAYOUT = layout_of(SHAPE, 16, torch.float32)


@pytest.fixture(scope="module")
def backend() -> NativeBackend:
    return NativeBackend(SHAPE, weights_of(SHAPE, torch.float32), torch.float32)


GOOD = SequenceStep(KVMemory(LAYOUT, 4), [2, 0], 0, [1, 2, 3], True)
BAD = {
    "token 131 outside the vocabulary": replace(GOOD, token_ids=[1, 131]),
    "token -1 outside the vocabulary": replace(GOOD, token_ids=[-1]),
    "block 4 of 4": replace(GOOD, block_table=[4]),
    "block -3 of 4": replace(GOOD, block_table=[-3]),
    "starts before position 0": replace(GOOD, start=-2),
    "turn -1 of": replace(GOOD, shift=-1),
    "do not fit into 2 blocks": replace(GOOD, start=30),
    "no tokens": replace(GOOD, token_ids=[]),
    "4 rows of logits of 3 tokens": replace(GOOD, trailing=4),
    "-1 rows of logits of 3 tokens": replace(GOOD, trailing=-1),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_sequence_is_named_and_nothing_is_written(backend: NativeBackend, message: str) -> None:
    bad = BAD[message]
    bad.memory.data.fill_(7.0)
    with pytest.raises(NativeError, match=message):
        backend.forward([GOOD, bad], None)
    assert (bad.memory.data == 7.0).all()
    assert backend.forward([GOOD], None).isfinite().all()


def test_a_huge_start_needs_no_huge_table(backend: NativeBackend) -> None:
    with pytest.raises(NativeError, match="sequence 0: 2147483647 tokens"):
        backend.forward([replace(GOOD, start=2**31 - 4)], None)


def test_memories_of_another_layout_are_refused(backend: NativeBackend) -> None:
    other = KVMemory(layout_of(SHAPE, 8, torch.float32), 4)
    with pytest.raises(NativeError, match="layout"):
        backend.forward([GOOD, replace(GOOD, memory=other)], None)
    narrow = KVMemory(layout_of(SHAPE, 16, torch.bfloat16), 4)
    with pytest.raises(NativeError, match="layout"):
        backend.forward([replace(GOOD, memory=narrow)], None)


def test_a_step_on_no_threads_is_refused(backend: NativeBackend) -> None:
    backend.set_threads(0)
    with pytest.raises(NativeError, match="threads"):
        backend.forward([GOOD], None)
    backend.set_threads(1)


def test_unsupported_models_raise_native_unavailable() -> None:
    weights = weights_of(SHAPE, torch.float32)
    with pytest.raises(NativeUnavailable, match="float16"):
        NativeBackend(SHAPE, weights, torch.float16)
    with pytest.raises(NativeUnavailable, match="instruction set"):
        NativeBackend(SHAPE, weights, torch.float32, "mmx")


def test_a_missing_library_is_refused_with_a_remedy(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_PATH", native._PATH.with_name("not_built.so"))
    native.load.cache_clear()
    try:
        with pytest.raises(NativeUnavailable, match="compiler"):
            NativeBackend(SHAPE, weights_of(SHAPE, torch.float32), torch.float32)
    finally:
        native.load.cache_clear()


def test_weights_of_another_size_are_refused() -> None:
    weights = weights_of(shape_of(hidden_size=96), torch.float32)
    with pytest.raises(NativeError, match="size"):
        NativeBackend(SHAPE, weights, torch.float32)


def test_a_byte_that_has_no_negative_is_refused() -> None:
    weights = byte_weights_of(SHAPE)
    head = weights.output_matrix()
    assert isinstance(head, ByteMatrix)
    head.values[5, 7] = -128
    with pytest.raises(NativeError, match="-128"):
        NativeBackend(SHAPE, weights, torch.bfloat16)


def test_an_aborted_sequence_writes_nothing_and_its_neighbour_is_untouched(backend: NativeBackend) -> None:
    pool, alone = Pool(LAYOUT, 8), Pool(LAYOUT, 8)
    expected = backend.forward([alone.sequence(20).step(tokens_of(20))], None)
    stopped, running = pool.sequence(20), pool.sequence(20)
    words = AbortWords(2)
    words.abort(0)
    logits = backend.forward([stopped.step(tokens_of(9)), running.step(tokens_of(20))], words)
    assert logits[0].isnan().all()
    assert torch.equal(logits[1], expected[0])
    assert pool.memory.data[stopped.table].isnan().all()


def test_all_aborted_returns_at_once(backend: NativeBackend) -> None:
    pool = Pool(LAYOUT, 8)
    words = AbortWords(1)
    words.abort(0)
    sequence = pool.sequence(20)
    assert backend.forward([sequence.step(tokens_of(20))], words).isnan().all()
    assert pool.memory.data.isnan().all()


def test_an_abort_from_another_thread_takes_effect_between_layers() -> None:
    shape = shape_of(num_layers=400, hidden_size=200)
    backend = NativeBackend(shape, weights_of(shape, torch.float32), torch.float32)
    backend.set_threads(2)
    pool = Pool(layout_of(shape, 16, torch.float32), 40)
    sequence, words = pool.sequence(512), AbortWords(1)
    step = sequence.step(tokens_of(512))
    worker = threading.Thread(target=backend.forward, args=([step], words))
    worker.start()
    first_layer = pool.memory.data[sequence.table[0], 0, 0, 0, 0]
    while first_layer.isnan():  # until the step is in its layers; ctypes has released the GIL
        time.sleep(0.001)
    words.abort(0)
    worker.join()
    written = [not pool.memory.data[sequence.table[0], i, 0, 0, 0].isnan() for i in range(400)]
    assert written[0]
    assert not written[-1]
    assert written == sorted(written, reverse=True)


def test_a_second_step_at_the_same_time_is_refused() -> None:
    shape = shape_of(num_layers=400, hidden_size=200)
    backend = NativeBackend(shape, weights_of(shape, torch.float32), torch.float32)
    layout = layout_of(shape, 16, torch.float32)
    first, second = Pool(layout, 40).sequence(512), Pool(layout, 40).sequence(512)
    words = AbortWords(1)
    worker = threading.Thread(target=backend.forward, args=([first.step(tokens_of(512))], words))
    worker.start()
    while first.memory.data[first.table[0], 0, 0, 0, 0].isnan():
        time.sleep(0.001)
    with pytest.raises(NativeError, match="another step"):
        backend.forward([second.step([1])], None)
    words.abort(0)
    worker.join()
