"""Adapters in parts on the Triton step: merged weights' logits and text, and the same bits at every degree.

The operators are their meanings here and ranks are threads; test_parts_with_kernels.py has the kernels, and
tests/diptych/worker_process/test_triton_group.py the orders of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from diptych.engine.adapters import part_adapter
from diptych.engine.adapters.reader import read_adapter
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.cuda_graph import EagerCapture
from diptych.engine.backends.triton.supports import supports
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.parallel.kv_shares import kv_shares
from diptych.engine.parallel.parts import deal_parts
from diptych.engine.parallel.stages import Grid, deal_stages
from diptych.engine.sampling import Sampled, SampleRow, SamplingParams
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.reader import Cut
from tests.adapters import merged, write_adapter
from tests.diptych.engine.adapters.adapted_steps import AdaptedSteps
from tests.diptych.engine.adapters.test_adapters import targets_of
from tests.diptych.engine.backends.triton.test_parts_backend import TritonRanks
from tests.diptych.engine.models import expert_models
from tests.diptych.engine.models.family_models import (
    CASES,
    config_of,
    oracle_logits,
    oracle_of,
    save,
    text_of,
)
from tests.diptych.engine.parallel.test_adapter_parts import AdaptedGroup
from tests.diptych.engine.parallel.thread_ranks import ThreadGroup, memory_of
from tests.diptych.engine.weights.quantised_folders import write
from tests.diptych.engine.weights.test_quantised_folders import KINDS
from tests.diptych.engine.weights.test_shards import plain
from tests.forms import sampled

PARTS, DEGREES = 4, (1, 2, 4)
TEXTS = [text_of(length, seed=length) for length in (40, 34, 36)]
"""Longer than 32 tokens: up to there transformers rotates longrope models by other factors."""
SLOTS = (0, None, 1)
WHOLE = {"whole_experts": True}
TOKENS = 8
EXACT = 2e-4
"""Largest difference of a logit in float32 from merged weights."""
SAMPLE = ("phi3", "gemma2", "olmo2")
"""Cases of fused matrices that share an A, norms of outputs, and norms over all heads."""
GREEDILY = SampleRow(SamplingParams(temperature=0.0), (), ())

pytestmark = pytest.mark.usefixtures("one_thread")


class Case:
    """A model, two adapters of it, and what transformers computes of the texts."""

    def __init__(self, oracle: Any, folder: Path, model: Path) -> None:
        self.oracle, self.model = oracle, model
        self.opened = open_checkpoint(model, "fp32")
        targets = [name for name in targets_of(oracle) if name.endswith("_proj")]
        self.folders = [
            write_adapter(folder / "all", oracle, seed=1, targets=targets),
            write_adapter(folder / "wide", oracle, seed=2, rank=9, targets=targets[:3]),
        ]
        self.models = [merged(oracle, self.folders[0]), oracle, merged(oracle, self.folders[1])]
        self.expected = [oracle_logits(one, text) for one, text in zip(self.models, TEXTS, strict=True)]

    def steps(self, group: ThreadGroup, dtype: torch.dtype = torch.float32) -> AdaptedSteps:
        """Return the steps of a group in which both adapters are placed."""
        return AdaptedSteps(AdaptedGroup(group), self.opened.shape, dtype, self.folders)

    def logits(self, group: ThreadGroup) -> list[torch.Tensor]:
        return self.steps(group).logits(TEXTS, SLOTS, 30)

    def differs(self, found: Sequence[torch.Tensor]) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(found, self.expected, strict=True))


def case_of(name: str, folder: Path) -> Case:
    oracle = oracle_of(config_of(name))
    return Case(oracle, folder, save(oracle, folder / "model"))


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Return a model of six query heads and three KV heads: parts of a head or two, some of which share."""
    return case_of("smollm3", tmp_path_factory.mktemp("smollm3"))


def greedy_of(model: Any, text: Sequence[int], count: int) -> list[int]:
    """Return the tokens that transformers picks after a text."""
    ids = list(text)
    for _ in range(count):
        ids.append(int(oracle_logits(model, ids)[-1].argmax()))
    return ids[len(text) :]


def check_bits(found: Sequence[Sequence[torch.Tensor]]) -> None:
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(other, found[0], strict=True))


@pytest.mark.parametrize("name", sampled(sorted(CASES), SAMPLE))
def test_two_adapters_and_the_base_are_merged_weights_at_every_degree(name: str, tmp_path: Path) -> None:
    case = case_of(name, tmp_path)
    if (why := supports(case.opened.shape)) is not None:
        pytest.skip(f"torch computes it: {why}")
    parts, degrees = (PARTS, DEGREES) if case.opened.shape.num_heads >= PARTS else (2, (1, 2))
    found = [case.logits(TritonRanks(case.opened, parts, ranks)) for ranks in degrees]
    assert case.differs(found[0]) < EXACT
    check_bits(found)


def test_greedy_text_is_that_of_merged_weights_at_every_degree(smollm: Case) -> None:
    expected = [greedy_of(model, text, TOKENS) for model, text in zip(smollm.models, TEXTS, strict=True)]
    found = []
    for ranks in DEGREES:
        steps = smollm.steps(TritonRanks(smollm.opened, PARTS, ranks))
        tokens, logits = steps.greedy(TEXTS, SLOTS, TOKENS)
        assert tokens == expected
        found.append(logits)
    check_bits(found)
    swapped = smollm.steps(TritonRanks(smollm.opened, PARTS, 2)).greedy(TEXTS, (1, None, 0), TOKENS)[0]
    assert (swapped[0] != expected[0], swapped[1] == expected[1], swapped[2] != expected[2]) == (True,) * 3


@pytest.mark.parametrize("name", sampled(sorted(expert_models.CONFIGS), ("mixtral", "qwen2_moe")))
@pytest.mark.parametrize("dealt", [WHOLE, {}, {**WHOLE, "all_to_all": True}], ids=["whole", "sliced", "sent"])
def test_experts_beside_adapted_attention(name: str, dealt: dict[str, bool], tmp_path: Path) -> None:
    """Adapters change the matrices that one process has changed: not those of experts."""
    oracle = expert_models.oracle_of(name)
    oracle.save_pretrained(tmp_path / "model")
    opened = open_checkpoint(tmp_path / "model", "fp32")
    if (why := supports(opened.shape)) is not None:
        pytest.skip(f"torch computes it: {why}")
    folder = write_adapter(tmp_path / "a", oracle, seed=1, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    text, found = text_of(20), []
    for ranks in DEGREES:
        group = AdaptedGroup(TritonRanks(opened, PARTS, ranks, **dealt))
        steps = AdaptedSteps(group, opened.shape, torch.float32, [folder])
        found.append(steps.logits([text], [0], 20))
    expected = oracle_logits(merged(oracle, folder), text)
    assert (found[0][0] - expected).abs().max() < 1e-3
    assert (oracle_logits(oracle, text) - expected).abs().max() > 0.1, "the adapter should show"
    check_bits(found)


@pytest.mark.parametrize("kind", ["awq", "llm.int8"])
def test_bases_whose_codes_stay_have_the_same_bits_at_every_degree(kind: str, tmp_path: Path) -> None:
    folder = plain(tmp_path)
    adapter = write_adapter(tmp_path / "a", AutoModelForCausalLM.from_pretrained(folder), seed=1)
    write(folder, *KINDS[kind])
    opened = open_checkpoint(folder, "packed")
    texts = [[token % 96 for token in text_of(20, seed=seed)] for seed in (1, 2)]

    def logits(backend: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        return AdaptedSteps(backend, opened.shape, dtype, [adapter]).logits(texts, (0, None), 20)

    groups = [AdaptedGroup(TritonRanks(opened, PARTS, ranks)) for ranks in DEGREES]
    found = [logits(group, torch.bfloat16) for group in groups]
    check_bits(found)
    plainly = TorchBackend(opened.shape, open_checkpoint(folder, "fp32").read_all().weights)
    for got, expected in zip(found[0], logits(plainly, torch.float32), strict=True):
        assert (got - expected).norm() / expected.norm() < 0.05


def test_rounded_numbers_have_the_same_bits_at_every_degree(smollm: Case) -> None:
    opened = open_checkpoint(smollm.model, "bf16")
    found = [
        smollm.steps(TritonRanks(opened, PARTS, ranks), torch.bfloat16).logits(TEXTS, SLOTS, 30)
        for ranks in DEGREES
    ]
    check_bits(found)
    assert EXACT < smollm.differs(found[0]) < 1.0


def test_stages_change_no_bit(smollm: Case) -> None:
    check_bits(
        [
            smollm.logits(TritonRanks(smollm.opened, 2, ranks, stages=stages))
            for ranks, stages in ((1, 1), (1, 2), (2, 2))
        ]
    )


def test_ranks_with_memories_of_their_own_compute_adapted_rows(smollm: Case) -> None:
    """Each holds its heads of the blocks, and its share of the adapter."""
    opened, shape = smollm.opened, smollm.opened.shape
    adapter = read_adapter(smollm.folders[0], shape, 64)

    def placed(group: ThreadGroup) -> ThreadGroup:
        made = AdaptedGroup(group)
        assert made.allow_adapters(2, 64) is None
        made.set_adapter(1, made.prepare_adapter(adapter))
        return group

    pool = memory_of(shape)
    steps = partial(SequenceStep, block_table=range(8), start=0, token_ids=TEXTS[0], wants_logits=True)
    expected = placed(TritonRanks(opened, 6, 1)).forward([steps(pool, trailing=40, adapter=1)])
    assert (expected - smollm.expected[0]).abs().max() < EXACT
    shares = kv_shares(deal_parts(shape, 6), deal_stages(shape, 2), Grid(3, 2))
    group = placed(TritonRanks(opened, 6, 3, stages=2, held=shares))
    own = [KVMemory(share.narrow(pool.layout), pool.num_blocks) for share in shares]
    found = group._forward([[steps(memory, trailing=40, adapter=1)] for memory in own])
    assert torch.equal(found, expected)
    for share, memory in zip(shares, own, strict=True):
        assert torch.equal(memory.data, share.of(pool.data))


# ---- recorded steps ------------------------------------------------------------------------------


class Recorded:
    """Ranks whose decode steps are recorded, with both adapters placed."""

    def __init__(self, case: Case, ranks: int) -> None:
        self.group = TritonRanks(case.opened, PARTS, ranks, on_device=True)
        self.memory = self.group.memory(16)
        block_size = self.memory.layout.block_size
        self.group.on_all(lambda backend: backend.plan_decode(4, block_size, EagerCapture()))
        self.group.on_all(lambda backend: backend.prepare_decode(self.memory))
        adapted = AdaptedGroup(self.group)
        for backend in self.group.backends:
            assert backend.allow_adapters(2, 64) is None
        for slot, folder in enumerate(case.folders):
            adapter = read_adapter(folder, case.opened.shape, 64)
            adapted.set_adapter(slot, adapted.prepare_adapter(adapter))

    def prompts(self, texts: Sequence[Sequence[int]], slots: Sequence[int | None]) -> list[int]:
        """Compute the texts, each in a step of its own; return the token after each."""
        return [
            int(self.group.forward([self.step(row, 0, text, slot)])[0].argmax())
            for row, (text, slot) in enumerate(zip(texts, slots, strict=True))
        ]

    def step(
        self, row: int, at: int, tokens: Sequence[int], slot: int | None, follows: int | None = None
    ) -> SequenceStep:
        table = range(4 * row, 4 * row + 4)
        return SequenceStep(self.memory, table, at, tokens, True, 1, follows, slot)

    def go_on(
        self, lengths: Sequence[int], first: Sequence[int], slots: Sequence[int | None], count: int
    ) -> list[list[int]]:
        """Launch `count` steps one after another, whose tokens the host does not know; return theirs."""

        def rows(number: int, *, known: bool) -> list[SequenceStep]:
            return [
                self.step(row, length + number, [token if known else 0], slot, None if known else row)
                for row, (length, token, slot) in enumerate(zip(lengths, first, slots, strict=True))
            ]

        def lead() -> list[list[int]]:
            backend, found, waiting = self.group.backends[0], [], None
            for number in range(count):
                launched = backend.launch(rows(number, known=number == 0), [GREEDILY] * len(first), None)
                assert launched is not None
                found += [] if waiting is None else [waiting.collect().tokens]
                waiting = launched
            found.append(waiting.collect().tokens)
            assert all(isinstance(token, Sampled) for tokens in found for token in tokens)
            return [[token.token_id for token in column] for column in zip(*found, strict=True)]

        def follow(backend: Any) -> None:
            for number in range(count):
                assert not backend.follow(rows(number, known=number == 0))

        return self.group.lead_and_follow(lead, follow)


def test_recorded_steps_of_mixed_rows_follow_one_another(smollm: Case) -> None:
    """A step with adapters is recorded by every rank when it is first launched, between others."""
    texts = [text[:length] for text, length in zip(TEXTS, (14, 11, 16), strict=True)]
    expected = [greedy_of(model, text, TOKENS + 1) for model, text in zip(smollm.models, texts, strict=True)]
    kept = []
    for ranks in (1, 2):
        recorded = Recorded(smollm, ranks)
        first = recorded.prompts(texts, SLOTS)
        assert first == [tokens[0] for tokens in expected]
        found = recorded.go_on([len(text) for text in texts], first, SLOTS, TOKENS)
        assert found == [tokens[1:] for tokens in expected]
        kept.append([recorded.memory.data])
        of_base = recorded.go_on([len(texts[0])], first[:1], (None,), 2)  # recorded without adapters
        assert of_base != [expected[0][1:3]], "the adapter should show"
    check_bits(kept)


# ---- controls ------------------------------------------------------------------------------------


def test_columns_that_are_off_by_one_give_other_logits(smollm: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(cut: Cut) -> Cut:
        if cut.columns is None or cut.columns.start == 0:
            return cut
        return Cut(columns=range(cut.columns.start - 1, cut.columns.stop - 1))

    _check_other_cut(smollm, monkeypatch, shifted)


def test_rows_of_another_head_give_other_logits(smollm: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts whose B has the rows of the head before."""
    width = smollm.opened.shape.head_dim

    def shifted(cut: Cut) -> Cut:
        if cut.rows is None or cut.rows.start < width:
            return cut
        return Cut(rows=range(cut.rows.start - width, cut.rows.stop - width))

    _check_other_cut(smollm, monkeypatch, shifted)


def _check_other_cut(case: Case, monkeypatch: pytest.MonkeyPatch, change: Callable[[Cut], Cut]) -> None:
    right = part_adapter.cut_of
    monkeypatch.setattr(part_adapter, "cut_of", lambda *given: change(right(*given)))
    assert case.differs(case.logits(TritonRanks(case.opened, PARTS, 2))) > 1e-2


def test_shares_of_other_ranks_give_other_logits(smollm: Case) -> None:
    """Two of three ranks, whose parts are of one size, have placed each other's share."""
    group = TritonRanks(smollm.opened, 3, 3)
    steps, made = smollm.steps(group), AdaptedGroup(group)
    assert smollm.differs(steps.logits(TEXTS, SLOTS, 30)) < EXACT
    first, second, third = made.prepare_adapter(read_adapter(smollm.folders[0], smollm.opened.shape, 64))
    sizes = [[(d.a.shape, d.b.shape) for d in own[0].deltas()] for own in (first, second)]  # type: ignore[index]
    assert sizes[0] == sizes[1]
    made.set_adapter(0, [second, first, third])
    assert smollm.differs(steps.logits(TEXTS, SLOTS, 30)) > 1e-2
