"""Rows of images in groups: transformers' logits, and every degree the bits of one process.

Ranks are threads here, and the others get steps by their plans. Real processes are in
tests/end_to_end/test_group_images.py.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from diptych.engine.backends.triton.parts_backend import TritonPartsBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.dtype import Precision, stored_dtype
from diptych.engine.kv.kv_memory import KVLayout
from diptych.engine.loaded_model import Model, load_model
from diptych.engine.parallel.step_plan import StepPlan, follow_plan, make_plan
from diptych.engine.runner import Runner
from diptych.engine.weights.checkpoint import open_checkpoint
from kernels.cpu import library
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.diptych.engine.parallel.native_ranks import NativeGroup
from tests.diptych.engine.parallel.thread_ranks import ThreadGroup
from tests.diptych.engine.vision.conftest import TEXT_HIDDEN, Vision
from tests.diptych.engine.vision.test_encoders import PICTURES, greedy_tokens, prefilled
from tests.forms import sampled

CLOSE = 1e-4
Group = Callable[..., Any]
GROUPS = {
    "torch": ThreadGroup,
    "native": NativeGroup,
    "triton": partial(
        ThreadGroup, make=partial(TritonPartsBackend, device="cpu", operators=REFERENCE_OPERATORS)
    ),
}
"""Makers of groups; the Triton step's operators are their meanings here."""
MADE = pytest.mark.parametrize("made", GROUPS.values(), ids=list(GROUPS))
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.library_path().exists(), reason="the native step was not built"),
]


class Planned(Runner):
    """A runner of a group whose other ranks have each step from its plan."""

    def __init__(self, group: Any, change: Callable[[StepPlan], StepPlan] = lambda plan: plan) -> None:
        """Compute with `group`; `change` is made of every plan, for controls."""
        shape, self.group, self._change = group.shape, group, change
        self.model = Model(shape, "fp32", torch.float32, group.backends[0], "torch-parts")
        self.layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, 16, torch.float32)

    def step(self, sequences: Sequence[SequenceStep], abort: None = None) -> torch.Tensor:
        memory = sequences[0].memory
        plan = self._change(make_plan(sequences, lambda _: 0))
        planned = follow_plan(pickle.loads(pickle.dumps(plan)), {0: memory})
        found: torch.Tensor = self.group.forward_planned(sequences, planned)
        return found


def without(field: str, value: Any) -> Callable[[StepPlan], StepPlan]:
    """Return what leaves a field of every row out of a plan."""
    return lambda plan: plan._replace(rows=tuple(row._replace(**{field: value}) for row in plan.rows))


@MADE
@pytest.mark.parametrize(("ranks", "stages"), sampled([(2, 1), (1, 2), (2, 2), (2, 3)], [(2, 2)]))
def test_logits_equal_transformers_and_their_bits_those_of_one_process(
    vision: Vision, made: Group, ranks: int, stages: int
) -> None:
    inputs = vision.inputs(PICTURES)
    ids = inputs["input_ids"][0].tolist()
    with torch.inference_mode():
        expected = vision.model(**inputs).logits[0]
    rows, spans = vision.embeddings(*PICTURES), vision.spans(ids, *PICTURES)
    opened = open_checkpoint(vision.folder, "fp32")
    alone, group = Planned(made(opened, 2, 1)), made(opened, 2, ranks, stages=stages)
    own, kept = prefilled(alone, vision, ids, rows, 70, spans)
    assert torch.allclose(own, expected, rtol=0, atol=CLOSE)
    found, memory = prefilled(Planned(group), vision, ids, rows, 70, spans)
    assert torch.equal(found, own)
    assert torch.equal(memory.data, kept.data)
    eos = vision.model.generation_config.eos_token_id
    of_group = greedy_tokens(Planned(group), memory, ids, own[-1], eos, spans)
    assert of_group == greedy_tokens(alone, kept, ids, own[-1], eos, spans)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_every_degree_of_the_native_step_has_the_same_bits_in_fewer_bits(
    vision: Vision, precision: Precision
) -> None:
    ids = vision.inputs(PICTURES)["input_ids"][0].tolist()
    rows, spans = vision.embeddings(*PICTURES), vision.spans(ids, *PICTURES)
    opened, dtype = open_checkpoint(vision.folder, precision), stored_dtype(precision)
    found = []
    for ranks, stages in ((1, 1), (2, 1), (1, 2), (2, 2)):
        planned = Planned(NativeGroup(opened, 2, ranks, dtype, stages=stages))
        planned.model = replace(planned.model, precision=precision, dtype=dtype)
        found.append(prefilled(planned, vision, ids, rows, 70, spans)[0])
    assert all(torch.equal(one, found[0]) for one in found)
    alone = Runner(load_model(vision.folder, "bf16", backend="native"), 1)
    expected, shifted = (prefilled(alone, vision, ids, of, 70, spans)[0] for of in (rows, rows.roll(1, 0)))
    # Rounding makes less of a difference than rows of the images that are off by one.
    assert 2 * (found[0] - expected).abs().mean() < (found[0] - shifted).abs().mean()


@MADE
def test_other_ranks_need_all_that_a_plan_says(vision: Vision, made: Group) -> None:
    """The controls: rows off by one, rows that see none behind them, rows behind layers and grids left out.

    The rows themselves enter in the first stage, which is rank 0's here, and all ranks' in the other group.
    """
    ids = vision.inputs(PICTURES)["input_ids"][0].tolist()
    rows, spans = vision.embeddings(*PICTURES), vision.spans(ids, *PICTURES)
    opened = open_checkpoint(vision.folder, "fp32")
    right, _ = prefilled(Planned(made(opened, 2, 1)), vision, ids, rows, 70, spans)

    def differs(change: Callable[[StepPlan], StepPlan], ranks: int, stages: int) -> bool:
        group = made(opened, 2, ranks, stages=stages)
        found, _ = prefilled(Planned(group, change), vision, ids, rows, 70, spans)
        return not torch.allclose(found, right, rtol=0, atol=CLOSE)

    assert differs(off_by_one, 2, 1)
    if spans:
        assert differs(without("grid", None), 2, 1)
        assert differs(without("grid", None), 1, 2)
    if vision.spec.whole:
        assert differs(seeing_nothing_ahead, 2, 1)
        assert differs(seeing_nothing_ahead, 1, 2)
    if rows.shape[1] > TEXT_HIDDEN:
        assert differs(off_by_one, 1, 3)


def off_by_one(plan: StepPlan) -> StepPlan:
    """Give every token of an image the row of the token before it."""

    def rolled(image: Any) -> Any:
        each = len(image.data) // image.tokens
        return image._replace(data=bytearray(image.data[-each:] + image.data[:-each]))

    rows = []
    for row in plan.rows:
        images = [rolled(image) for image in row.images]
        if images and all(image.tokens == 1 for image in images):  # a row at a time
            others = [*images[1:], images[0]]
            images = [one._replace(data=other.data) for one, other in zip(images, others, strict=True)]
        rows.append(row._replace(images=tuple(images)))
    return plan._replace(rows=tuple(rows))


def seeing_nothing_ahead(plan: StepPlan) -> StepPlan:
    rows = (
        row._replace(images=tuple(image._replace(whole=False) for image in row.images)) for row in plan.rows
    )
    return plan._replace(rows=tuple(rows))
