"""Hidden rows and features of layers in groups, which heads draft from: those of one process, with its bits.

Ranks are threads here. Real processes are in tests/end_to_end/test_group_heads.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.batch import SequenceStep, StepOutput
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.sampling import SampleRow, SamplingParams
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.reader import OpenCheckpoint
from kernels.cpu import library
from tests.diptych.engine.models.family_models import config_of, oracle_of, save, text_of
from tests.diptych.engine.parallel.native_ranks import NativeGroup
from tests.diptych.engine.parallel.thread_ranks import ThreadGroup, memory_of
from tests.diptych.worker_process.thread_rank_group import Change, rank_zero
from tests.forms import sampled

CLOSE = 1e-4
LIKELIEST = SampleRow(SamplingParams(temperature=0.0), (), ())
LONG, SHORT = 80, 9
"""Tokens of steps whose rows ranks divide, and of such whose rows they do not."""
PARENTS = [-1, 0, 0, 1, 2, 4]
LAYERS = {"hidden": (), "taps": (3, 0, 2), "all": (4,)}
"""Layers whose features are wanted, of four; the last number is behind the final norm."""
Made = Callable[..., Any]
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.library_path().exists(), reason="the native step was not built"),
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenCheckpoint:
    """Six query heads, three KV heads, four layers."""
    folder = save(oracle_of(config_of("smollm3")), tmp_path_factory.mktemp("m"))
    return open_checkpoint(folder, "fp32")


def steps_of(memory: KVMemory) -> list[list[SequenceStep]]:
    """Return a prompt's chunks, a decode row beside one, drafts to be checked, and a tree of them."""
    text, table = text_of(LONG + 2 * SHORT + len(PARENTS)), range(8)
    beside = SequenceStep(memory, [15], 0, [9], wants_logits=True)
    middle, last = LONG + SHORT, LONG + 2 * SHORT
    return [
        [SequenceStep(memory, table, 0, text[:LONG], wants_logits=False)],
        [beside, SequenceStep(memory, table, LONG, text[LONG:middle], wants_logits=True)],
        [SequenceStep(memory, table, middle, text[middle:last], wants_logits=True, trailing=SHORT)],
        [SequenceStep(memory, table, last, text[last:], True, trailing=len(PARENTS), parents=PARENTS)],
    ]


def computed(backend: Any, memory: KVMemory, layers: tuple[int, ...]) -> list[StepOutput]:
    """Return the outputs of all steps, the last row of each step greedy."""
    giving = backend.give_features(layers) if layers else backend.give_hidden_rows()
    found = []
    for sequences in steps_of(memory):
        rows = sum(step.logit_rows for step in sequences)
        draws = [*[None] * (rows - 1), LIKELIEST][:rows]
        found.append(giving.forward_and_sample(sequences, draws, None))
    return found


def in_group(
    opened: OpenCheckpoint,
    made: Made,
    layers: tuple[int, ...],
    ranks: int,
    stages: int,
    change: Change | None = None,
) -> list[StepOutput]:
    memory = memory_of(opened.shape, 16)
    with rank_zero(made(opened, 2, ranks, stages=stages), memory, change) as backend:
        return computed(backend, memory, layers)


def check_close(found: StepOutput, expected: StepOutput, layers: tuple[int, ...]) -> None:
    assert found.hidden is not None
    assert expected.hidden is not None
    assert found.hidden.shape == expected.hidden.shape
    assert torch.allclose(found.hidden, expected.hidden, rtol=0, atol=CLOSE)
    if layers:
        assert found.features is not None
        assert expected.features is not None
        assert found.features.shape == expected.features.shape
        assert torch.allclose(found.features, expected.features, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("made", [ThreadGroup, NativeGroup], ids=["torch", "native"])
@pytest.mark.parametrize("layers", LAYERS.values(), ids=list(LAYERS))
def test_every_degree_gives_the_rows_of_one_process(
    opened: OpenCheckpoint, made: Made, layers: tuple[int, ...]
) -> None:
    memory = memory_of(opened.shape, 16)
    whole = computed(TorchBackend(opened.shape, opened.read_all().weights), memory, layers)
    alone = in_group(opened, made, layers, 1, 1)
    for own, expected in zip(alone, whole, strict=True):
        check_close(own, expected, layers)
    for ranks, stages in ((2, 1), (1, 2), (2, 2), (1, 4)):
        for found, own in zip(in_group(opened, made, layers, ranks, stages), alone, strict=True):
            for name in ("hidden", "features") if layers else ("hidden",):
                assert torch.equal(getattr(found, name), getattr(own, name)), (ranks, stages, name)
            assert len(found.tokens) == len(own.tokens)
            common = min(len(found.logits), len(own.logits))  # a pipeline samples nothing
            assert torch.equal(found.logits[:common], own.logits[:common])


@pytest.mark.parametrize("made", [ThreadGroup, NativeGroup], ids=["torch", "native"])
@pytest.mark.parametrize(("ranks", "stages"), sampled([(2, 1), (1, 2)], [(1, 2)]))
def test_other_ranks_need_the_tree_that_a_plan_has(
    opened: OpenCheckpoint, made: Made, ranks: int, stages: int
) -> None:
    """The control: ranks that see a chain in place of the tree give other rows."""

    def as_chain(plan: Any) -> Any:
        return plan._replace(rows=tuple(row._replace(parents=None) for row in plan.rows))

    right = in_group(opened, made, (), ranks, stages)[-1].hidden
    wrong = in_group(opened, made, (), ranks, stages, as_chain)[-1].hidden
    assert right is not None
    assert wrong is not None
    assert torch.allclose(wrong[:2], right[:2], rtol=0, atol=CLOSE)  # as far as it is one
    assert not torch.allclose(wrong, right, rtol=0, atol=CLOSE)


def test_launched_steps_have_their_hidden_rows(opened: OpenCheckpoint) -> None:
    """Launch greedy steps of native groups that follow one another ahead."""
    memory, text = memory_of(opened.shape, 16), text_of(SHORT)
    steps = [
        SequenceStep(memory, range(8), SHORT - 1, text[-1:], wants_logits=True),
        SequenceStep(memory, range(8), SHORT, [0], wants_logits=True, follows=0),
    ]
    found = {}
    for ranks in (1, 2):
        with rank_zero(NativeGroup(opened, 2, ranks), memory) as backend:
            giving: Any = backend.give_hidden_rows()
            before = [SequenceStep(memory, range(8), 0, text[:-1], wants_logits=False)]
            giving.forward_and_sample(before, [], None)
            launched = [giving.launch([step], [LIKELIEST], None) for step in steps]
            found[ranks] = [step.collect() for step in launched]
    for one, other in zip(found[1], found[2], strict=True):
        assert one.tokens == other.tokens
        assert torch.equal(one.hidden, other.hidden)
        assert one.hidden.abs().max() > 0
