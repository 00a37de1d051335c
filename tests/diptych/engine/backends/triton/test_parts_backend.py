"""The parts of a model on the Triton step: every degree has the same bits, and the text is that of torch.

The operators are their meanings here and ranks are threads, so that what is tested is the planning: what is
dealt, exchanged and added, and which heads of a block a rank reads. test_with_kernels.py has the kernels,
tests/gpu/test_parallel.py processes and devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from diptych.engine.backends.triton import parts_layers
from diptych.engine.backends.triton.cuda_graph import EagerCapture
from diptych.engine.backends.triton.packed_step import Group, PackedStep, SeeingRows, TableRows
from diptych.engine.backends.triton.parts_backend import TritonPartsBackend
from diptych.engine.backends.triton.parts_layers import _narrowed
from diptych.engine.backends.triton.supports import supports
from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.parallel.kv_shares import KVShare, kv_shares
from diptych.engine.parallel.parts import deal_parts
from diptych.engine.parallel.stages import Grid, deal_stages
from diptych.engine.sampling import Sampled, SampleRow, SamplingParams
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.reader import OpenCheckpoint
from kernels.sum_parts import sum_parts
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.diptych.engine.models import expert_models
from tests.diptych.engine.models.family_models import CASES, config_of, oracle_of, save, text_of
from tests.diptych.engine.parallel.part_checks import (
    GREEDY,
    TEXT,
    check_family,
    check_layers,
    check_next_heads,
    check_other_degree,
    check_other_sums,
    next_heads,
    stopped,
)
from tests.diptych.engine.parallel.thread_ranks import (
    ThreadGroup,
    go_on,
    memory_of,
    whole,
)
from tests.diptych.engine.weights.quantised_folders import write
from tests.diptych.engine.weights.test_quantised_folders import KINDS
from tests.diptych.engine.weights.test_shards import plain

GREEDILY = SampleRow(SamplingParams(temperature=0.0), (), ())
TritonRanks = partial(
    ThreadGroup, make=partial(TritonPartsBackend, device="cpu", operators=REFERENCE_OPERATORS)
)
"""The group of threads whose ranks compute by the Triton step."""
SAMPLE = frozenset({"gemma2", "olmo2", "granite", "internlm3"})
"""Cases of every kind of switch that parts meet: caps, norms of outputs and of all heads, scales, biases."""
EXPERTS = frozenset({"mixtral", "gpt_oss"})
"""Cases with experts: plain ones, and biased ones with sinks of attention."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> OpenCheckpoint:
    """Six query heads, three KV heads."""
    return open_checkpoint(save(oracle_of(config_of("smollm3")), tmp_path_factory.mktemp("m")), "fp32")


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.full) for n in sorted(CASES)]
)
def test_parts_of_every_family_give_the_whole_and_every_degree_the_same_bits(
    case: str, tmp_path: Path
) -> None:
    check_family(case, tmp_path, TritonRanks, supports)


SENT = {"whole_experts": True, "all_to_all": True}


@pytest.mark.parametrize(
    "dealing",
    [{"whole_experts": True}, {"whole_experts": False}, SENT],
    ids=["whole", "sliced", "all-to-all"],
)
@pytest.mark.parametrize(
    "case",
    [pytest.param(n, marks=() if n in EXPERTS else pytest.mark.full) for n in sorted(expert_models.CONFIGS)],
)
def test_experts_give_the_whole_and_every_degree_the_same_bits(
    case: str, dealing: dict[str, bool], tmp_path: Path
) -> None:
    """Four parts: more than the two KV heads, and ten experts that they do not divide."""
    expert_models.oracle_of(case).save_pretrained(tmp_path)
    opened = open_checkpoint(tmp_path, "fp32")
    if (why := supports(opened.shape)) is not None:
        pytest.skip(f"torch computes {why}")
    text = torch.randint(
        0, opened.shape.vocab_size, (20,), generator=torch.Generator().manual_seed(5)
    ).tolist()
    found = {}
    for ranks in (1, 2, 4):
        group = TritonRanks(opened, 4, ranks, **dealing)
        found[ranks] = group.step(group.memory(), 0, text, len(text))
    assert (found[1] - whole(opened, text)).abs().max() < 1e-3
    for ranks in (2, 4):
        assert torch.equal(found[ranks], found[1]), ranks


@pytest.mark.parametrize("kind", ["awq", "nf4", "llm.int8"])
def test_a_files_codes_give_the_bits_of_one_rank_at_every_degree(kind: str, tmp_path: Path) -> None:
    folder = plain(tmp_path)
    write(folder, *KINDS[kind])
    opened, text = open_checkpoint(folder, "packed"), [token % 96 for token in text_of(20)]
    found = {}
    for ranks in (1, 2, 4):
        group = TritonRanks(opened, 4, ranks)
        memory = memory_of(opened.shape, dtype=torch.bfloat16)
        found[ranks] = group.step(memory, 0, text, len(text))
    assert torch.equal(found[2], found[1])
    assert torch.equal(found[4], found[1])
    expected = whole(open_checkpoint(folder, "fp32"), text)
    assert (found[1] - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (3, 1), (2, 3)])
def test_any_degree_goes_on_from_the_blocks_of_any_other(
    llama: OpenCheckpoint, prefill: int, decode: int
) -> None:
    check_other_degree(partial(TritonRanks, llama), memory_of(llama.shape), prefill, decode)


def test_text_is_that_of_parts_computed_by_torch(llama: OpenCheckpoint) -> None:
    text = text_of(TEXT)
    found = []
    for made in (TritonRanks, ThreadGroup):
        group = made(llama, 3, 3)
        memory = group.memory()
        group.step(memory, 0, text[:-1])
        found.append(group.decode(memory, text, GREEDY)[0])
    assert found[0] == found[1]


def test_stages_change_no_bit(llama: OpenCheckpoint) -> None:
    text = text_of(TEXT)
    one, two = TritonRanks(llama, 2, 1), TritonRanks(llama, 2, 2, stages=2)
    memories = one.memory(), two.memory()
    logits = [group.step(memory, 0, text) for group, memory in zip((one, two), memories, strict=True)]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(memories[0].data, memories[1].data)


def test_ranks_with_memories_of_their_own_hold_their_share_of_the_common_blocks(
    llama: OpenCheckpoint,
) -> None:
    text, grid = text_of(TEXT), Grid(3, 2)
    pool = memory_of(llama.shape)
    expected = TritonRanks(llama, 6, 1).step(pool, 0, text)
    shares = kv_shares(deal_parts(llama.shape, 6), deal_stages(llama.shape, 2), grid)
    group = TritonRanks(llama, 6, 3, stages=2, held=shares)
    own = [KVMemory(share.narrow(pool.layout), pool.num_blocks) for share in shares]
    assert torch.equal(group.step(own, 0, text), expected)
    for share, memory in zip(shares, own, strict=True):
        assert torch.equal(memory.data, share.of(pool.data))


def test_rows_that_see_beyond_their_own_position_read_the_heads_of_their_part() -> None:
    """Narrow them as rows of decodes and chunks: to the layers and heads of a share of a block."""
    blocks, none = torch.arange(2 * 3 * 2 * 3 * 4.0).view(2, 3, 2, 3, 4), torch.zeros(0)
    seeing = SeeingRows(slice(0, 2), blocks, none, 0, none)
    group = Group(blocks, slice(0, 2), None, ())
    step = PackedStep(none, none, none, (TableRows(none, (group,), (seeing,)),))
    share = KVShare(range(1, 3), range(2, 3))
    (table,) = _narrowed(step, share).tables
    for rows in (*table.groups, *table.seeing):
        assert torch.equal(rows.blocks, share.of(blocks))
        assert not torch.equal(rows.blocks, KVShare(range(1, 3), range(1, 2)).of(blocks))


def test_heads_that_are_off_by_one_give_other_text(llama: OpenCheckpoint) -> None:
    """The control: parts that read the next KV head of the blocks give other logits and other tokens."""
    shifted = TritonRanks(llama, 3, 3, dealt=next_heads(deal_parts(llama.shape, 3)))
    check_next_heads(partial(TritonRanks, llama), shifted)


def test_parts_that_are_added_in_another_order_give_other_bits(llama: OpenCheckpoint) -> None:
    """The control of the bits."""

    def backwards(parts: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(sum_parts(parts.flip(0)))

    def backwards_normed(
        parts: torch.Tensor, *rest: torch.Tensor, eps: float = 0.0, out: torch.Tensor
    ) -> torch.Tensor:
        return REFERENCE_OPERATORS.sum_parts_rms_norm(parts.flip(0), *rest, out=out)

    other = replace(REFERENCE_OPERATORS, sum_parts=backwards, sum_parts_rms_norm=backwards_normed)
    wrong = ThreadGroup(llama, 3, 1, make=partial(TritonPartsBackend, device="cpu", operators=other))
    check_other_sums(TritonRanks(llama, 3, 1), wrong)


def test_an_aborted_step_ends_within_a_layer_and_the_next_is_computed(llama: OpenCheckpoint) -> None:
    group = TritonRanks(llama, 2, 1)
    memory = group.memory(16)
    steps = [SequenceStep(memory, range(at, at + 4), 0, text_of(20), True) for at in (0, 4)]
    words = AbortWords(2)
    words.abort(1)
    logits = group.backends[0].forward(steps, words)
    assert torch.isfinite(logits[0]).all()
    assert logits[1].isnan().all()
    words.abort(0)
    later = [SequenceStep(memory, range(at, at + 4), 0, text_of(20), True) for at in (8, 12)]
    assert group.backends[0].forward(later, words).isnan().all()
    assert not memory.data[8:, 2:].any(), "at most one more layer was begun"
    assert torch.isfinite(group.backends[0].forward(later, None)).all()


def test_ranks_stop_before_the_same_layer(llama: OpenCheckpoint) -> None:
    assert not stopped(TritonRanks(llama, 2, 2)).data[:, 2:].any()


@pytest.mark.parametrize(("ahead", "written"), [(0, 1), (2, 3), (None, 4)])
@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_that_exchange_on_the_device_stop_before_a_layer_that_none_has_come_to(
    llama: OpenCheckpoint, stages: int, ahead: int | None, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a bound of the layers that are launched ahead the step is computed to its end."""
    monkeypatch.setattr(parts_layers, "layers_ahead", lambda device, tokens: ahead)
    check_layers(stopped(TritonRanks(llama, 2, 2, stages=stages, on_device=True)), written)


class Recorded:
    """Two ranks whose decode steps are recorded, over one memory."""

    def __init__(
        self,
        opened: OpenCheckpoint,
        text: Sequence[int],
        ranks: int = 2,
        stages: int = 1,
        **dealing: bool,
    ) -> None:
        self.group = TritonRanks(opened, 2, ranks, stages=stages, on_device=True, **dealing)
        self.memory, self.text = self.group.memory(), text
        self.group.step(self.memory, 0, text[:-1])
        block_size = self.memory.layout.block_size
        self.group.on_all(lambda backend: backend.plan_decode(4, block_size, EagerCapture()))
        self.group.on_all(lambda backend: backend.prepare_decode(self.memory))

    def steps(self) -> list[int]:
        """Go on with steps that follow one another: only rank 0 knows a token, and it none of the last."""

        def step(number: int, token: int) -> list[SequenceStep]:
            at, follows = len(self.text) - 1 + number, None if number == 0 else 0
            return [SequenceStep(self.memory, range(8), at, [token], True, 1, follows)]

        def lead() -> list[int]:
            backend, found = self.group.backends[0], []
            waiting = backend.launch(step(0, self.text[-1]), [GREEDILY], None)
            for number in range(1, GREEDY):
                following = backend.launch(step(number, 0), [GREEDILY], None)
                found += waiting.collect().tokens
                waiting = following
            return [
                token.token_id for token in found + waiting.collect().tokens if isinstance(token, Sampled)
            ]

        def follow(backend: TritonPartsBackend) -> None:
            for number in range(GREEDY):
                assert not backend.follow(step(number, self.text[-1] if number == 0 else 0))

        return self.group.lead_and_follow(lead, follow)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (1, 2)])
def test_recorded_steps_follow_tokens_that_rank_0_alone_has(
    llama: OpenCheckpoint, ranks: int, stages: int
) -> None:
    text = text_of(TEXT)
    alone, kept = TritonRanks(llama, 2, 1), memory_of(llama.shape)
    alone.step(kept, 0, text[:-1])
    expected = go_on(alone, kept, text, GREEDY)[0]
    recorded = Recorded(llama, text, ranks, stages)
    assert recorded.steps() == expected
    assert torch.equal(recorded.memory.data, kept.data)


def test_steps_are_not_recorded_where_an_exchange_comes_to_the_host(llama: OpenCheckpoint) -> None:
    group = TritonRanks(llama, 2, 2)
    assert [backend.plan_decode(4, 16) for backend in group.backends] == [0, 0]
    assert [backend.plan_prompts(group.memory().layout, 64) for backend in group.backends] == [0, 0]
