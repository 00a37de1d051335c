"""The native step's experts in parts: the whole's logits, and at every degree the same bits, whether experts
are dealt whole or each one's inner numbers.

Ranks are threads here. Real processes are in tests/end_to_end/test_native_groups.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.engine.backends.native.backend import NativeUnavailable
from diptych.engine.backends.native.share import Share
from diptych.engine.backends.native.status import NativeError
from diptych.engine.batch import AbortWords, SequenceStep
from diptych.engine.dtype import Precision, stored_dtype
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.parallel.parts import Part
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.reader import OpenCheckpoint
from kernels.cpu import library
from tests.diptych.engine.models import expert_models
from tests.diptych.engine.parallel.native_ranks import NativeGroup
from tests.diptych.engine.parallel.thread_ranks import whole

EXACT = 1e-3
"""Largest difference of a logit in float32."""
CASES = sorted(name for name in expert_models.CONFIGS if not name.startswith("deepseek"))
"""DeepSeek's attend over latents, which the native step does not compute."""
SAMPLE = frozenset({"olmoe", "gpt_oss", "glm4_moe"})
"""Norms over all heads, biases of experts, a shared expert beside dense layers."""
TEXT, GREEDY = 70, 8
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")
DEALT = pytest.mark.parametrize("whole_experts", [True, False], ids=["whole", "sliced"])

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.library_path().exists(), reason="the native step was not built"),
]


def opened_model(case: str, folder: Path, precision: Precision = "fp32") -> OpenCheckpoint:
    expert_models.oracle_of(case).save_pretrained(folder)
    return open_checkpoint(folder, precision)


def text_of(vocab: int, seed: int = 5, length: int = TEXT) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@DEALT
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.full) for name in CASES]
)
def test_parts_of_every_family_give_the_whole_and_every_degree_the_same_bits(
    case: str, whole_experts: bool, tmp_path: Path
) -> None:
    """Four parts: more than the two KV heads, and ten experts of 38 inner numbers that they do not divide."""
    opened = opened_model(case, tmp_path)
    text = text_of(opened.shape.vocab_size)
    found = {}
    for ranks in (1, 2, 4):
        group = NativeGroup(opened, 4, ranks, whole_experts=whole_experts)
        memory = group.memory()
        found[ranks] = group.step(memory, 0, text, len(text)), memory.data.clone()
    assert (found[1][0] - whole(opened, text)).abs().max() < EXACT
    for ranks in (2, 4):
        assert torch.equal(found[ranks][0], found[1][0]), ranks
        assert torch.equal(found[ranks][1], found[1][1]), ranks


@DEALT
@pytest.mark.parametrize("case", ["mixtral", "gpt_oss"])
def test_greedy_tokens_are_those_of_transformers(case: str, whole_experts: bool, tmp_path: Path) -> None:
    oracle = expert_models.oracle_of(case)
    oracle.save_pretrained(tmp_path)
    opened = open_checkpoint(tmp_path, "fp32")
    group, text = NativeGroup(opened, 2, 2, whole_experts=whole_experts), text_of(opened.shape.vocab_size)
    memory = group.memory()
    group.step(memory, 0, text[:-1])
    assert expert_models.is_greedy(oracle, text, group.decode(memory, text, GREEDY)[0])


@DEALT
@pytest.mark.parametrize("precision", PRECISIONS)
def test_any_degree_goes_on_from_the_blocks_of_any_other(
    precision: Precision, whole_experts: bool, tmp_path: Path
) -> None:
    """A shared expert, dense layers; two ranks of two parts, and four of one."""
    opened, dtype = opened_model("glm4_moe", tmp_path, precision), stored_dtype(precision)
    text = text_of(opened.shape.vocab_size)

    def made(ranks: int) -> NativeGroup:
        return NativeGroup(opened, 4, ranks, dtype, whole_experts=whole_experts)

    alone = made(1)
    kept = alone.memory()
    alone.step(kept, 0, text[:-1])
    pool = KVMemory(kept.layout, kept.num_blocks)
    made(2).step(pool, 0, text[:-1])
    assert torch.equal(pool.data, kept.data)
    expected, found = alone.decode(kept, text, GREEDY), made(4).decode(pool, text, GREEDY)
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_other_rows_chunks_and_threads_change_no_bit(precision: Precision, tmp_path: Path) -> None:
    """Rows of other sequences share the experts of a part, or leave it none."""
    opened, dtype = opened_model("qwen2_moe", tmp_path, precision), stored_dtype(precision)
    texts = [text_of(opened.shape.vocab_size, seed, 40) for seed in (1, 2, 3)]
    one, two = (
        NativeGroup(opened, 3, ranks, dtype, threads=threads, whole_experts=True)
        for ranks, threads in ((1, 1), (3, 2))
    )
    kept, pool = one.memory(16), two.memory(16)
    expected = [
        torch.cat(
            [
                one.forward([SequenceStep(kept, range(8), at, text[at : at + 8], True, 8)])
                for at in range(0, 40, 8)
            ]
        )
        for text in texts
    ]
    steps = [
        SequenceStep(pool, range(4 * at, 4 * at + 4), 0, text, True, len(text))
        for at, text in enumerate(texts)
    ]
    assert torch.equal(two.forward(steps), torch.cat(expected))


@pytest.mark.parametrize("case", ["mixtral", "olmoe"])
def test_an_aborted_step_ends_for_all_ranks_and_the_next_one_has_its_bits(case: str, tmp_path: Path) -> None:
    """OLMoE's ranks meet within attention, too. Of few rows they begin the first layer."""
    opened = opened_model(case, tmp_path)
    group, alone = (NativeGroup(opened, 2, ranks, whole_experts=True) for ranks in (2, 1))
    memory, text, words = group.memory(16), text_of(opened.shape.vocab_size, length=20), AbortWords(1)
    words.abort(0)
    assert group.forward([SequenceStep(memory, range(8, 12), 0, text, True)], words).isnan().all()
    assert not memory.data[8:, 1:].any(), "no rank began the second layer"
    assert torch.equal(group.step(memory, 0, text), alone.step(alone.memory(), 0, text))


def test_experts_that_are_off_by_one_give_other_logits(tmp_path: Path) -> None:
    """The control: a rank that takes the matrices of its experts for those of the next ones."""
    opened = opened_model("mixtral", tmp_path)
    text = text_of(opened.shape.vocab_size)

    class Shifted(Share):
        def _experts(self, part: Part) -> range:
            own = super()._experts(part)
            return range(own.start + 1, own.stop + 1) if self.rank == 0 else own

    logits = [
        group.step(group.memory(), 0, text, len(text))
        for group in (NativeGroup(opened, 2, 2, whole_experts=True, kind=kind) for kind in (Share, Shifted))
    ]
    assert (logits[0] - whole(opened, text)).abs().max() < EXACT
    assert (logits[1] - logits[0]).abs().max() > 1e-2


@pytest.mark.parametrize("precision", PRECISIONS)
def test_other_dealings_give_other_bits(precision: Precision, tmp_path: Path) -> None:
    """The control of the bits: whole experts and slices of all are other sums."""
    opened, dtype = opened_model("mixtral", tmp_path, precision), stored_dtype(precision)
    text = text_of(opened.shape.vocab_size)
    first, second = (
        group.step(group.memory(), 0, text, len(text))
        for group in (NativeGroup(opened, 2, 1, dtype, whole_experts=dealt) for dealt in (True, False))
    )
    assert not torch.equal(first, second)


@DEALT
def test_a_rank_holds_its_share_of_the_weights(whole_experts: bool, tmp_path: Path) -> None:
    opened = opened_model("mixtral", tmp_path, "int8")
    (alone,), pair = (
        NativeGroup(opened, 2, ranks, torch.bfloat16, whole_experts=whole_experts).weight_bytes
        for ranks in (1, 2)
    )
    assert max(pair) < 1.1 * alone / 2


def test_stages_of_experts_give_the_bits_of_one(tmp_path: Path) -> None:
    opened = opened_model("glm4_moe", tmp_path)
    text = text_of(opened.shape.vocab_size)
    alone, group = (NativeGroup(opened, 2, *of, whole_experts=True) for of in ((1,), (2,)))
    staged = NativeGroup(opened, 2, 2, stages=3, whole_experts=True)
    logits = [each.step(each.memory(), 0, text, 9) for each in (alone, group, staged)]
    assert torch.equal(logits[1], logits[0])
    assert torch.equal(logits[2], logits[0])


def test_experts_that_a_part_does_not_have_are_refused(tmp_path: Path) -> None:
    opened = opened_model("mixtral", tmp_path)

    class Beyond(Share):
        def _experts(self, part: Part) -> range:
            own = super()._experts(part)
            return range(own.start + 9, own.stop + 9)

    class Narrow(Share):
        def _part_experts(self) -> Any:
            experts = super()._part_experts()
            assert experts is not None
            experts[0].intermediate -= 1
            return experts

    with pytest.raises(NativeUnavailable, match="a part has no such experts"):
        NativeGroup(opened, 2, 2, whole_experts=True, kind=Beyond)
    with pytest.raises(NativeError, match="the matrix has another size"):
        NativeGroup(opened, 2, 2, kind=Narrow)
