"""Adapters in parts give what merged weights give, and every degree the same bits, beside rows of the base.

Ranks are threads here. Real processes are in tests/end_to_end/test_group_adapters.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.engine.adapters import part_adapter
from diptych.engine.adapters.adapter import Adapter, Delta
from diptych.engine.adapters.part_adapter import part_adapters
from diptych.engine.adapters.reader import read_adapter
from diptych.engine.backends.native.supports import supports
from diptych.engine.batch import SequenceStep
from diptych.engine.dtype import Precision, stored_dtype
from diptych.engine.parallel.parts import deal_parts
from diptych.engine.parallel.step_plan import follow_plan, make_plan
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.reader import Cut, OpenCheckpoint
from diptych.worker_process.group.adapter_message import pickle_adapter, unpickle_adapter
from kernels.cpu import library
from tests.adapters import merged, write_adapter
from tests.diptych.engine.adapters.adapted_steps import AdaptedSteps
from tests.diptych.engine.adapters.test_adapters import targets_of
from tests.diptych.engine.models.family_models import config_of, oracle_logits, oracle_of, save, text_of
from tests.diptych.engine.parallel.native_ranks import NativeGroup
from tests.diptych.engine.parallel.thread_ranks import ThreadGroup, memory_of

IN_CI = ("phi3", "gemma2")
"""Fused matrices that share an A; heads whose borders lie within a strip of columns, and norms around."""
MORE = ("smollm3", "arcee", "granite", "seed-oss", "olmo2", "nemotron")
"""Split matrices, no gate, scales, biases, norms over all heads, other norms."""
TEXTS = [text_of(length, seed=length) for length in (40, 23, 33)]
SLOTS = (0, None, 1)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.library_path().exists(), reason="the native step was not built"),
]


class AdaptedGroup:
    """All ranks of a group as one backend with adapters."""

    def __init__(self, group: ThreadGroup | NativeGroup) -> None:
        self._group = group

    def forward(self, sequences: Sequence[Any], abort: None) -> torch.Tensor:
        return self._group.forward(sequences, abort)

    def allow_adapters(self, slots: int, max_rank: int) -> str | None:
        return {backend.allow_adapters(slots, max_rank) for backend in self._group.backends}.pop()

    def prepare_adapter(self, adapter: Adapter) -> list[object]:
        return [backend.prepare_adapter(adapter) for backend in self._group.backends]

    def set_adapter(self, slot: int, prepared: list[object]) -> None:
        for backend, own in zip(self._group.backends, prepared, strict=True):
            backend.set_adapter(slot, own)


def by_torch(opened: OpenCheckpoint, parts: int, ranks: int, stages: int = 1) -> ThreadGroup:
    return ThreadGroup(opened, parts, ranks, stages=stages)


def natively(
    opened: OpenCheckpoint, parts: int, ranks: int, stages: int = 1, dtype: torch.dtype = torch.float32
) -> NativeGroup:
    return NativeGroup(opened, parts, ranks, dtype, stages=stages)


class Case:
    """A model, two adapters of it, and what transformers computes of the texts."""

    def __init__(self, name: str, folder: Path) -> None:
        oracle = oracle_of(config_of(name))
        self.model = save(oracle, folder / "model")
        self.opened = open_checkpoint(self.model, "fp32")
        self.adapters = [
            write_adapter(folder / "all", oracle, seed=1, targets=targets_of(oracle)),
            write_adapter(folder / "wide", oracle, seed=2, rank=9, targets=targets_of(oracle)[:3]),
        ]
        models = merged(oracle, self.adapters[0]), oracle, merged(oracle, self.adapters[1])
        self.expected = [oracle_logits(one, text) for one, text in zip(models, TEXTS, strict=True)]

    def logits(self, group: ThreadGroup | NativeGroup) -> list[torch.Tensor]:
        dtype = group.dtype if isinstance(group, NativeGroup) else torch.float32
        steps = AdaptedSteps(AdaptedGroup(group), self.opened.shape, dtype, self.adapters)
        return steps.logits(TEXTS, SLOTS, 30)  # 83 rows, whose norms a native group divides, and 13

    def differs(self, found: Sequence[torch.Tensor]) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(found, self.expected, strict=True))


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Return a model of six query heads and three KV heads."""
    return Case("smollm3", tmp_path_factory.mktemp("smollm3"))


@pytest.mark.parametrize("make", [by_torch, natively])
@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.full) for name in IN_CI + MORE]
)
def test_two_adapters_and_the_base_in_one_batch_are_merged_weights_at_every_degree(
    name: str, make: Callable[..., Any], tmp_path: Path
) -> None:
    case = Case(name, tmp_path)
    if make is natively and (why := supports(case.opened.shape)) is not None:
        pytest.skip(f"torch computes it: {why}")
    parts, degrees = (6, (2, 3, 6)) if case.opened.shape.num_heads >= 6 else (2, (2,))
    alone = case.logits(make(case.opened, parts, 1))
    assert case.differs(alone) < 2e-4
    for ranks in degrees:
        for found, expected in zip(case.logits(make(case.opened, parts, ranks)), alone, strict=True):
            assert torch.equal(found, expected), ranks


@pytest.mark.parametrize("make", [by_torch, natively])
def test_stages_change_no_bit(smollm: Case, make: Callable[..., Any]) -> None:
    alone = smollm.logits(make(smollm.opened, 2, 1))
    staged = smollm.logits(make(smollm.opened, 2, 2, stages=2))
    assert all(torch.equal(*pair) for pair in zip(staged, alone, strict=True))


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_rounded_numbers_have_the_same_bits_at_every_degree(smollm: Case, precision: Precision) -> None:
    opened, dtype = open_checkpoint(smollm.model, precision), stored_dtype(precision)
    alone, three = (smollm.logits(natively(opened, 6, ranks, dtype=dtype)) for ranks in (1, 3))
    assert all(torch.equal(*pair) for pair in zip(three, alone, strict=True))
    assert 2e-4 < smollm.differs(alone) < 1.0


@pytest.mark.parametrize("make", [by_torch, natively])
def test_columns_that_are_off_by_one_give_other_logits(
    smollm: Case, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: parts whose A reads the numbers of the next ones."""
    right = part_adapter.cut_of

    def shifted(*given: Any) -> Cut:
        cut = right(*given)
        if cut.columns is None or cut.columns.start == 0:
            return cut
        return Cut(columns=range(cut.columns.start - 1, cut.columns.stop - 1))

    monkeypatch.setattr(part_adapter, "cut_of", shifted)
    assert smollm.differs(smollm.logits(make(smollm.opened, 2, 2))) > 1e-2


def test_a_part_holds_no_more_of_an_adapter_than_it_computes(smollm: Case) -> None:
    adapter = read_adapter(smollm.adapters[0], smollm.opened.shape, 64)
    shape, layers = smollm.opened.shape, range(1, 3)
    parts = part_adapters(adapter, shape, deal_parts(shape, 2), layers)
    for number, layer in enumerate(layers):
        for field, whole in adapter.layers[layer].items():
            own = [part.layers[number][field] for part in parts]
            if field in ("o", "down"):
                assert torch.equal(torch.cat([delta.a for delta in own], dim=1), whole.a)
                held = [delta.a for delta in own]
            else:
                assert torch.equal(torch.cat([delta.b for delta in own]), whole.b)
                held = [delta.b for delta in own]
            assert all(one.untyped_storage().nbytes() == one.nbytes for one in held), field


def test_a_message_has_an_adapters_own_numbers_and_shared_ones_once() -> None:
    whole = torch.arange(64.0).view(8, 8)
    a, b = whole[2:4], torch.ones(8, 2, dtype=torch.bfloat16)
    adapter = Adapter(({"q": Delta(a, b, 2.0), "k": Delta(a, b[:4], 0.5)}, {}))
    found = unpickle_adapter(pickle_adapter(adapter))
    q, k = found.layers[0]["q"], found.layers[0]["k"]
    assert found.layers[1] == {}
    assert (q.scale, k.scale) == (2.0, 0.5)
    assert q.a is k.a
    assert torch.equal(q.a, a)
    assert torch.equal(q.b, b)
    assert torch.equal(k.b, b[:4])
    assert q.a.untyped_storage().nbytes() == a.nbytes


def test_a_plan_names_the_slot_of_each_row(smollm: Case) -> None:
    memory = memory_of(smollm.opened.shape)
    steps = [SequenceStep(memory, range(1), 0, [1], True, adapter=slot) for slot in (1, None, 0)]
    plan = make_plan(steps, lambda _: 4)
    assert [step.adapter for step in follow_plan(plan, {4: memory})] == [1, None, 0]
