"""Trees of tokens in the native step: each has the bits that it has in the chain of its ancestors alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.native.status import NativeError
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.batch import BatchError, SequenceStep, check_batch
from diptych.engine.kv.kv_memory import KVMemory
from kernels.cpu import library as native
from tests.kernels.cpu.tiny_models import layout_of, shape_of, tokens_of, weights_of

SHAPE = shape_of(windows=(None, 9), qk_norm="head")
PLACES = [
    (dtype, name)
    for dtype, number in ((torch.float32, native.FP32), (torch.bfloat16, native.BF16))
    for name in native.instruction_sets(number)
]
Backend = NativeBackend | TorchBackend


def computed(
    backend: Backend, dtype: torch.dtype, start: int, tokens: list[int], parents: list[int] | None, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and hidden rows of `tokens` after `start` others, beside a decode row."""
    layout = layout_of(SHAPE, size, dtype)
    blocks = layout.blocks_for(start + len(tokens)) + 1
    memory, table = KVMemory(layout, 2 * blocks), random.Random(4).sample(range(2 * blocks), blocks)
    other = [block for block in range(2 * blocks) if block not in table]
    backend.forward([SequenceStep(memory, table, 0, tokens_of(start), wants_logits=False)], None)
    step = SequenceStep(memory, table, start, tokens, True, trailing=len(tokens), parents=parents)
    beside = SequenceStep(memory, other, 0, [7], wants_logits=True)
    output = backend.give_hidden_rows().forward_and_sample([beside, step], [None] * (1 + len(tokens)), None)
    assert output.hidden is not None
    return output.logits[1:], output.hidden[1:]


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def random_tree(seed: int) -> tuple[list[int], list[int]]:
    rng = random.Random(seed)
    parents = [-1, *(rng.randrange(-1 if seed % 2 else 0, place) for place in range(1, rng.randrange(4, 20)))]
    return tokens_of(len(parents), seed=seed), parents


@pytest.mark.parametrize(("dtype", "name"), PLACES, ids=str)
def test_each_node_has_the_bits_of_its_chain_alone(dtype: torch.dtype, name: str) -> None:
    backend = NativeBackend(SHAPE, weights_of(SHAPE, dtype), dtype, name)
    for seed, (start, size) in enumerate([(5, 4), (30, 16), (37, 5), (1, 16)]):
        tokens, parents = random_tree(seed)
        logits, hidden = computed(backend, dtype, start, tokens, parents, size)
        for node in range(len(tokens)):
            path = path_to(parents, node)
            alone = computed(backend, dtype, start, [tokens[one] for one in path], None, size)
            assert torch.equal(logits[node], alone[0][-1])
            assert torch.equal(hidden[node], alone[1][-1])


def test_it_is_what_the_reference_computes_and_a_mask_off_by_one_is_not() -> None:
    weights = weights_of(SHAPE, torch.float32)
    native_one, reference = NativeBackend(SHAPE, weights, torch.float32), TorchBackend(SHAPE, weights)
    tokens, parents = random_tree(2)
    logits, hidden = computed(native_one, torch.float32, 21, tokens, parents, 8)
    expected = computed(reference, torch.float32, 21, tokens, parents, 8)
    torch.testing.assert_close(logits, expected[0], atol=2e-4, rtol=0)
    torch.testing.assert_close(hidden, expected[1], atol=2e-4, rtol=0)
    chains = [
        computed(reference, torch.float32, 21, [tokens[one] for one in path_to(parents, node)], None, 8)
        for node in range(len(tokens))
    ]
    torch.testing.assert_close(expected[0], torch.stack([one[0][-1] for one in chains]), atol=1e-4, rtol=0)
    off = [-1, *(max(0, parent - 1) for parent in parents[1:])]
    assert off != parents
    for backend in (native_one, reference):
        wrong, _ = computed(backend, torch.float32, 21, tokens, off, 8)
        assert (wrong - expected[0]).abs().max() > 0.1


@pytest.mark.parametrize("parents", [[-1, 1, 0], [-1, 2, 0], [-2, 0, 0], [-1, 0]], ids=str)
def test_parents_that_make_no_tree_are_refused(parents: list[int]) -> None:
    backend = NativeBackend(SHAPE, weights_of(SHAPE, torch.float32), torch.float32)
    memory = KVMemory(layout_of(SHAPE, 16, torch.float32), 2)
    step = SequenceStep(memory, [1], 0, [1, 2, 3], True, parents=parents)
    with pytest.raises(BatchError, match="make no tree"):
        check_batch([step], SHAPE.vocab_size)
    if len(parents) == len(step.token_ids):
        with pytest.raises(NativeError, match="follows token"):
            backend.forward([step], None)
    assert backend.forward([replace(step, parents=[-1, 0, 0])], None).isfinite().all()
