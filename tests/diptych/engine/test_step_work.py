"""Bytes and operations of steps, beside those that are counted one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.loaded_model import Model
from diptych.engine.models.shape import ExpertsShape, LayerShape
from diptych.engine.runner import Runner
from diptych.engine.step_work import WorkArithmetic
from diptych.worker_process.loaded_engine import LoadedEngine
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.kernels.cpu.tiny_models import Pool, layout_of, shape_of, weights_of

WEIGHT_BYTES = 12_345


def counted(shape: Any, batch: list[tuple[int, int, bool]]) -> tuple[int, int]:
    """Return bytes of keys and values, and operations, key by key."""
    kept = operations = 0
    for start, count, wants_logits in batch:
        for layer in range(shape.num_layers):
            window = shape.layers[layer].window or 10**9
            seen = [range(max(0, at - window + 1), at + 1) for at in range(start, start + count)]
            operations += sum(map(len, seen)) * 4 * shape.num_heads * shape.head_dim
            kept += len(set().union(*seen)) * 2 * shape.num_kv_heads * shape.head_dim * 2
        operations += wants_logits * 2 * shape.vocab_size * shape.hidden_size
    return kept, operations


@pytest.mark.parametrize("windows", [(None, None), (7, None)])
def test_keys_and_scores_are_those_that_tokens_see(windows: tuple[int | None, ...]) -> None:
    shape = shape_of(windows=windows)
    layout = layout_of(shape, 16, torch.bfloat16)
    memory = KVMemory(layout, 1)
    batch = [(0, 1, True), (0, 20, False), (5, 9, True), (30, 4, False), (40, 1, True)]
    steps = [SequenceStep(memory, [0], start, [1] * count, wants) for start, count, wants in batch]
    found = WorkArithmetic(shape, layout, WEIGHT_BYTES).of(steps)
    kept, operations = counted(shape, batch)
    matrices = sum(
        getattr(layer, name).numel()
        for layer in weights_of(shape, torch.float32).layers
        for name in ("q", "k", "v", "o", "gate", "up", "down")
    )
    assert found.read_bytes == WEIGHT_BYTES + kept
    assert found.operations == operations + 2 * matrices * sum(count for _, count, _ in batch)


def test_a_token_passes_its_own_experts_and_the_shared_one() -> None:
    experts = ExpertsShape(8, 2, 30, shared_size=50)
    shape = shape_of(experts=experts, layers=(LayerShape(experts=True), LayerShape()))
    layout = layout_of(shape, 16, torch.bfloat16)
    step = SequenceStep(KVMemory(layout, 1), [0], 0, [1], False)
    routed = 3 * 100 * (2 * 30 + 50) + 100 * 8
    attention = 2 * 100 * (6 + 6 + 3 + 3) * 40
    expected = 2 * (attention + routed + 3 * 100 * 150) + 2 * 4 * 6 * 40
    assert WorkArithmetic(shape, layout, 0).of([step]).operations == expected


@pytest.mark.parametrize(("tokens", "share"), [(1, 2 / 8), (2, 7 / 16), (400, 1.0)])
def test_experts_are_read_as_often_as_even_choices_want_them(tokens: int, share: float) -> None:
    experts = ExpertsShape(8, 2, 30)
    shape = shape_of(experts=experts, layers=(LayerShape(experts=True), LayerShape()))
    layout = layout_of(shape, 16, torch.bfloat16)
    backend = TritonBackend(shape, weights_of(shape, torch.bfloat16), "cpu", REFERENCE_OPERATORS)
    assert backend.expert_bytes == 8 * 3 * 30 * shape.hidden_size * 2
    steps = [SequenceStep(KVMemory(layout, 1), [0], 0, [1], False)] * tokens
    of_keys = WorkArithmetic(shape, layout, 0).of(steps).read_bytes
    found = WorkArithmetic(shape, layout, backend.weight_bytes, backend.expert_bytes).of(steps).read_bytes
    common = backend.weight_bytes - backend.expert_bytes
    assert found == of_keys + common + round(share * backend.expert_bytes)


def test_a_worker_counts_the_steps_of_a_backend_that_knows_its_weights() -> None:
    """The Triton step in its meaning: bytes are those of its tensors, and each batch is counted once."""
    shape = shape_of(tied_embeddings=False)
    weights = weights_of(shape, torch.float32)
    backend = TritonBackend(shape, weights, "cpu", REFERENCE_OPERATORS)
    model = Model(shape, "fp32", torch.float32, backend, "triton")
    engine = LoadedEngine(model, Runner(model), layout_of(shape, 16, torch.float32), "digest", "fp32")
    counted: list[tuple[int, int]] = []
    engine.count_work(lambda read, operations: counted.append((read, operations)))
    sequence = Pool(engine.layout, 2).sequence(20)
    for ids in ([1, 2, 3], [4]):
        engine.runner.step([sequence.step(ids)])
    arithmetic = WorkArithmetic(shape, engine.layout, backend.weight_bytes)
    steps = [
        SequenceStep(sequence.memory, [0], 0, [1] * 3, True),
        SequenceStep(sequence.memory, [0], 3, [1], True),
    ]
    assert counted == [(work.read_bytes, work.operations) for work in (arithmetic.of([one]) for one in steps)]
    assert weights.head is not None
    tensors = [weights.final_norm, weights.head]
    for layer in weights.layers:
        tensors += [one for one in vars(layer).values() if isinstance(one, torch.Tensor)]
    assert backend.weight_bytes == sum(one.nbytes for one in tensors)


def test_a_worker_on_a_cpu_counts_nothing() -> None:
    shape = shape_of()
    model = Model(
        shape, "fp32", torch.float32, TorchBackend(shape, weights_of(shape, torch.float32)), "torch"
    )
    engine = LoadedEngine(model, Runner(model), layout_of(shape, 16, torch.float32), "digest", "fp32")
    engine.count_work(lambda read, operations: pytest.fail("counted"))
    assert engine.runner.on_work is None
