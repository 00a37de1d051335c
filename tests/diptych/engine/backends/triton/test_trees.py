"""Trees of tokens of changing shape in packed steps, beside chains; on a GPU with the kernels themselves."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.kernels.cpu.tiny_models import layout_of, shape_of, tokens_of, weights_of
from tests.triton_device import DEVICES, device_of

SHAPE = shape_of(qk_norm="head")
CONTEXT, BLOCK = (21, 5, 40), 16


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the device of the step; on the CPU torch takes the place of the kernels."""
    return device_of(request.param, interprets=False)


def random_parents(seed: int) -> list[int]:
    """Return a tree below one token, as a verification has it: of up to 63 more."""
    rng = random.Random(seed)
    return [-1, *(rng.randrange(place) for place in range(1, rng.choice([2, 5, 21, 64])))]


def step_of(memory: KVMemory, row: int, parents: list[int] | None, count: int) -> SequenceStep:
    """Return a step of `count` tokens behind the context of a sequence."""
    tokens = tokens_of(count, seed=count)
    table = range(8 * row, 8 * row + 8)
    return SequenceStep(memory, table, CONTEXT[row], tokens, True, trailing=count, parents=parents)


def test_every_node_sees_its_ancestors_alone_whatever_the_tree_is_like(device: torch.device) -> None:
    """Trees of consecutive steps differ, as those that go where a head is sure; one row has none."""
    weights = weights_of(SHAPE, torch.float32)
    ours = TritonBackend(SHAPE, weights, device, None if device.type == "cuda" else REFERENCE_OPERATORS)
    theirs, layout = TorchBackend(SHAPE, weights), layout_of(SHAPE, BLOCK, torch.float32)
    memories = KVMemory.on_device(layout, 24, device), KVMemory(layout, 24)
    for backend, memory in zip((ours, theirs), memories, strict=True):
        context = [
            SequenceStep(memory, range(8 * row, 8 * row + 8), 0, tokens_of(length, seed=row), False)
            for row, length in enumerate(CONTEXT)
        ]
        backend.forward(context, None)
    for number in range(5):
        trees = [random_parents(2 * number), random_parents(2 * number + 1), None]
        counts = [1 if one is None else len(one) for one in trees]
        got, expected = (
            backend.forward(
                [step_of(memory, row, *one) for row, one in enumerate(zip(trees, counts, strict=True))], None
            )
            for backend, memory in zip((ours, theirs), memories, strict=True)
        )
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)
    wrong = [0 if parent == 1 else parent for parent in trees[0] or ()]  # control
    assert wrong != trees[0]
    other = ours.forward([step_of(memories[0], 0, wrong, counts[0])], None)
    assert (other - expected[: counts[0]]).abs().max() > 0.01
