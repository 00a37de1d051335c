"""Steps: mixed batches over several memories, shared prefixes, aborts, and batches that must be refused."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from diptych.engine.batch import AbortWords, BatchError, SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import Model, load_model
from diptych.engine.runner import Runner

SHAPE = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 40,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("tiny")
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, initializer_range=0.3)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def torch_model(folder: Path) -> Model:
    return load_model(folder, torch.float32, backend="torch")


@pytest.fixture(scope="module", params=["torch", "native"])
def model(folder: Path, request: pytest.FixtureRequest) -> Model:
    return load_model(folder, torch.float32, backend=request.param)


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, 67, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(model: Model, tokens: list[int]) -> torch.Tensor:
    """Logits after the last of `tokens`, computed in one step in a memory of its own."""
    memory = KVMemory(model.kv_layout(16), 8)
    return Runner(model, 1).step([SequenceStep(memory, range(8), 0, tokens, True)])[0]


def test_decode_rows_and_chunks_of_several_memories_in_one_batch(model: Model) -> None:
    runner = Runner(model, 1)
    one, two = KVMemory(model.kv_layout(16), 12), KVMemory(model.kv_layout(16), 12)
    a, b, c = ids(33, 1), ids(48, 2), ids(20, 3)
    first = [
        SequenceStep(one, [7, 3, 5], 0, a[:32], False),
        SequenceStep(two, [7, 3, 5], 0, b[:16], False),
    ]
    assert runner.step(first).shape == (0, 67)
    mixed = [
        SequenceStep(one, [7, 3, 5], 32, a[32:], True),
        SequenceStep(two, [1, 2], 0, c[:10], False),
        SequenceStep(two, [7, 3, 5], 16, b[16:], True),
        SequenceStep(one, [0, 1], 0, c, True),
    ]
    logits = runner.step(mixed)
    assert logits.shape == (3, 67)
    for row, tokens in zip(logits, (a, b, c), strict=True):
        torch.testing.assert_close(row, alone(model, tokens), atol=1e-5, rtol=0)


def test_logits_after_several_tokens_of_a_chunk_are_those_of_its_prefixes(model: Model) -> None:
    runner, memory = Runner(model, 1), KVMemory(model.kv_layout(16), 8)
    a, b = ids(21, 8), ids(6, 9)
    logits = runner.step(
        [
            SequenceStep(memory, [6, 1], 0, a, True, trailing=4),
            SequenceStep(memory, [2], 0, ids(3, 10), False, trailing=3),
            SequenceStep(memory, [0], 0, b, True, trailing=6),
        ]
    )
    prefixes = [a[:end] for end in range(18, 22)] + [b[:end] for end in range(1, 7)]
    assert logits.shape == (10, 67)
    for row, tokens in zip(logits, prefixes, strict=True):
        torch.testing.assert_close(row, alone(model, tokens), atol=1e-5, rtol=0)


def test_all_rows_of_an_aborted_chunk_are_lost_and_no_others(model: Model) -> None:
    memory, words = KVMemory(model.kv_layout(16), 8), AbortWords(2)
    words.abort(0)
    steps = [
        SequenceStep(memory, [6], 0, ids(5, 1), True, trailing=3),
        SequenceStep(memory, [2], 0, ids(4, 2), True, trailing=2),
    ]
    logits = Runner(model, 1).step(steps, words)
    assert logits[:3].isnan().all()
    torch.testing.assert_close(logits[4], alone(model, ids(4, 2)), atol=1e-5, rtol=0)
    assert logits[3].isfinite().all()


def test_a_shared_prefix_is_read_in_place(model: Model) -> None:
    runner, memory = Runner(model, 1), KVMemory(model.kv_layout(16), 8)
    prefix, tails = ids(32, 4), (ids(5, 5), ids(9, 6))
    runner.step([SequenceStep(memory, [6, 1], 0, prefix, False)])
    before = bytes(memory.block_bytes(6)), bytes(memory.block_bytes(1))
    logits = runner.step(
        [SequenceStep(memory, [6, 1, last], 32, tail, True) for last, tail in zip((0, 3), tails, strict=True)]
    )
    assert (bytes(memory.block_bytes(6)), bytes(memory.block_bytes(1))) == before
    for row, tail in zip(logits, tails, strict=True):
        torch.testing.assert_close(row, alone(model, prefix + tail), atol=1e-5, rtol=0)


def test_only_granted_lanes_are_written(model: Model) -> None:
    memory = KVMemory(model.kv_layout(16), 6)
    memory.data.fill_(9.0)
    Runner(model, 1).step([SequenceStep(memory, [4, 2, 0], 0, ids(20, 7), True)])
    assert (memory.data[[0, 1, 3, 5]] == 9.0).all()
    keys = memory.data[2, :, 0].view(4, 3, 40, 16)
    values = memory.data[2, :, 1].view(4, 3, 16, 40)
    assert (keys[..., 4:] == 9.0).all()
    assert (values[..., 4:, :] == 9.0).all()
    assert (keys[..., :4] != 9.0).all()
    assert (values[..., :4, :] != 9.0).all()


class _AbortAt(AbortWords):
    """Sets the words `targets` when the step has asked about them `after` times."""

    def __init__(self, count: int, targets: list[int], after: int) -> None:
        super().__init__(count)
        self._targets, self._left = targets, after

    def all_aborted(self) -> bool:
        if self._left == 0:
            for target in self._targets:
                self.abort(target)
        self._left -= 1
        return super().all_aborted()


def test_an_abort_takes_effect_at_the_next_layer_and_spares_the_others(torch_model: Model) -> None:
    memory = KVMemory(torch_model.kv_layout(16), 4)
    memory.data.fill_(9.0)
    kept, dropped = ids(16, 8), ids(16, 9)
    steps = [SequenceStep(memory, [3], 0, dropped, True), SequenceStep(memory, [1], 0, kept, True)]
    logits = Runner(torch_model, 1).step(steps, _AbortAt(2, [0], after=2))
    written = [bool((memory.data[3, layer] != 9.0).all()) for layer in range(4)]
    assert written == [True, True, False, False]
    assert (memory.data[3, 2:] == 9.0).all()
    assert logits[0].isnan().all()
    torch.testing.assert_close(logits[1], alone(torch_model, kept), atol=1e-5, rtol=0)


def test_a_step_whose_rows_are_all_aborted_ends_early(torch_model: Model) -> None:
    memory = KVMemory(torch_model.kv_layout(16), 4)
    memory.data.fill_(9.0)
    step = SequenceStep(memory, [2], 0, ids(16, 8), True)
    logits = Runner(torch_model, 1).step([step], _AbortAt(1, [0], after=1))
    assert logits.shape == (1, 67)
    assert (memory.data[2, 1:] == 9.0).all()
    assert (memory.data[2, 0] != 9.0).all()


def test_an_aborted_sequence_writes_nothing(model: Model) -> None:
    memory = KVMemory(model.kv_layout(16), 4)
    memory.data.fill_(9.0)
    kept, dropped = ids(16, 8), ids(16, 9)
    steps = [SequenceStep(memory, [3], 0, dropped, True), SequenceStep(memory, [1], 0, kept, True)]
    abort = AbortWords(2)
    abort.abort(0)
    logits = Runner(model, 1).step(steps, abort)
    assert (memory.data[[0, 2, 3]] == 9.0).all()
    torch.testing.assert_close(logits[1], alone(model, kept), atol=1e-5, rtol=0)
    abort.abort(1)
    assert Runner(model, 1).step(steps, abort).shape == (2, 67)


@pytest.mark.parametrize(
    ("table", "start", "tokens", "message"),
    [
        ([1], 0, [], "no tokens"),
        ([1], -1, [1], "before position 0"),
        ([1], 0, [1] * 17, "do not fit"),
        ([1], 16, [1], "do not fit"),
        ([1, 4], 16, [1], "outside the memory"),
        ([-1], 0, [1], "outside the memory"),
        ([1], 0, [67], "vocabulary"),
        ([1], 0, [-1], "vocabulary"),
    ],
)
def test_a_batch_that_would_leave_its_memory_is_refused_whole(
    model: Model, table: list[int], start: int, tokens: list[int], message: str
) -> None:
    memory = KVMemory(model.kv_layout(16), 4)
    good = SequenceStep(memory, [0], 0, [1, 2], True)
    with pytest.raises(BatchError, match=f"row 1: .*{message}"):
        Runner(model, 1).step([good, SequenceStep(memory, table, start, tokens, True)])
    assert not memory.data.any(), "nothing was written"


@pytest.mark.parametrize("trailing", [-1, 3])
def test_more_rows_of_logits_than_tokens_are_refused(model: Model, trailing: int) -> None:
    step = SequenceStep(KVMemory(model.kv_layout(16), 1), [0], 0, [1, 2], True, trailing=trailing)
    with pytest.raises(BatchError, match=f"{trailing} rows of logits of 2 tokens"):
        Runner(model, 1).step([step])


def test_threads_are_set_in_the_thread_that_steps(torch_model: Model) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    seen: list[int] = []

    def work() -> None:
        Runner(torch_model, 1).step([SequenceStep(KVMemory(torch_model.kv_layout(16), 1), [0], 0, [1], True)])
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert seen == [1]
    with pytest.raises(ValueError, match="negative"):
        Runner(torch_model, -1)


def test_an_empty_step_gives_no_logits(model: Model) -> None:
    assert Runner(model, 1).step([]).shape == (0, 67)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="gguf"):
        load_model(tmp_path / "model.bin", torch.float32, backend="torch")
