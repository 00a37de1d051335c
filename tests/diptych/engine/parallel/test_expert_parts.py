"""Models with experts, latents and norms over all heads in parts: the whole's logits, and at every degree the
same bits, whether experts are dealt whole or each one's inner numbers.

Ranks are threads here. Real processes are in tests/end_to_end/test_expert_parallel.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diptych.engine.backends.torch import expert_rows, part_sums
from diptych.engine.backends.torch.experts import ExpertFeedForward
from diptych.engine.backends.torch.part_sums import PartSums
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.parallel.parts import deal_parts
from diptych.engine.weights import tensor_files
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.reader import OpenCheckpoint
from tests.diptych.engine.models import expert_models, family_models
from tests.diptych.engine.parallel.thread_ranks import ThreadGroup, whole

EXACT = 1e-3
"""Largest difference of a logit in float32."""
SAMPLE = frozenset({"mixtral", "olmoe", "gpt_oss", "deepseek_v3"})
TEXT = 50
WHOLE, SLICED = {"whole_experts": True}, {"whole_experts": False}
SENT = {"whole_experts": True, "all_to_all": True}
right_places = expert_rows._places


pytestmark = pytest.mark.usefixtures("one_thread")


def opened_model(name: str, folder: Path) -> OpenCheckpoint:
    expert_models.oracle_of(name).save_pretrained(folder)
    return open_checkpoint(folder, "fp32")


def text_of(opened: OpenCheckpoint) -> list[int]:
    vocab = opened.shape.vocab_size
    return torch.randint(0, vocab, (TEXT,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("dealing", [WHOLE, SLICED, SENT], ids=["whole", "sliced", "all-to-all"])
@pytest.mark.parametrize(
    "case",
    [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.full) for n in sorted(expert_models.CONFIGS)],
)
def test_parts_of_every_family_give_the_whole_and_every_degree_the_same_bits(
    case: str, dealing: dict[str, bool], tmp_path: Path
) -> None:
    """Four parts: more than the two KV heads, and ten experts that they do not divide."""
    opened = opened_model(case, tmp_path)
    text = text_of(opened)
    groups = {ranks: ThreadGroup(opened, 4, ranks, **dealing) for ranks in (1, 2, 4)}
    found = {}
    for ranks, group in groups.items():
        memory = group.memory()
        found[ranks] = group.step(memory, 0, text, len(text)), memory.data.clone()
    assert (found[1][0] - whole(opened, text)).abs().max() < EXACT
    for ranks in (2, 4):
        assert torch.equal(found[ranks][0], found[1][0]), ranks
        assert torch.equal(found[ranks][1], found[1][1]), ranks


@pytest.mark.parametrize("case", ["mixtral", "deepseek_v3"])
def test_rows_that_are_sent_go_on_from_fewer_rows_than_parts(case: str, tmp_path: Path) -> None:
    """Decode steps of one row: three of four ranks have none. Dense layers, a shared expert and latents."""
    opened = opened_model(case, tmp_path)
    text = text_of(opened)
    found = {}
    for ranks in (1, 2, 4):
        group = ThreadGroup(opened, 4, ranks, **SENT)
        memory = group.memory()
        group.step(memory, 0, text[:-1])
        found[ranks] = group.decode(memory, text, 6)
    assert found[2][0] == found[4][0] == found[1][0]
    assert torch.equal(found[2][1], found[1][1])
    assert torch.equal(found[4][1], found[1][1])


@pytest.mark.parametrize("wrong", ["numbers", "order"])
def test_rows_that_go_to_other_experts_or_come_back_in_another_order_give_other_logits(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controls of all-to-all."""
    opened = opened_model("mixtral", tmp_path)
    text = text_of(opened)
    right = ThreadGroup(opened, 2, 2, **SENT)
    expected = right.step(right.memory(), 0, text, len(text))
    assert (expected - whole(opened, text)).abs().max() < EXACT
    if wrong == "numbers":
        compute = ExpertFeedForward.compute
        monkeypatch.setattr(
            ExpertFeedForward,
            "compute",
            lambda self, number, x: compute(self, min(number + 1, max(self.numbers)), x),
        )
    else:
        monkeypatch.setattr(expert_rows, "_places", lambda here: right_places(here).flip(0))
    group = ThreadGroup(opened, 2, 2, **SENT)
    assert (group.step(group.memory(), 0, text, len(text)) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("case", ["mixtral", "deepseek_v3"])
def test_sums_in_two_steps_have_the_bits_of_one(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = opened_model(case, tmp_path)
    text = text_of(opened)
    alone = ThreadGroup(opened, 4, 1, whole_experts=True)
    expected = alone.step(alone.memory(), 0, text, len(text))
    gathered = []
    gather = PartSums.gather_rows
    monkeypatch.setattr(part_sums, "LEAST_SAVED_BYTES", 1)
    monkeypatch.setattr(
        PartSums, "gather_rows", lambda self, *given: gathered.append(1) or gather(self, *given)
    )
    for ranks in (2, 4):
        gathered.clear()
        group = ThreadGroup(opened, 4, ranks, whole_experts=True)
        assert torch.equal(group.step(group.memory(), 0, text, len(text)), expected), ranks
        assert len(gathered) == 2 * opened.shape.num_layers * ranks


def test_the_expert_of_every_token_is_held_once_where_rows_are_sent(tmp_path: Path) -> None:
    opened = opened_model("deepseek_v3", tmp_path)
    group = ThreadGroup(opened, 4, 2, **SENT)
    for backend in group.backends:
        first, second = (one.experts_of(opened.shape.num_layers - 1) for one in backend._decoder.decoders)
        assert first is not None
        assert second is not None
        assert first._shared is not None
        assert first._shared is second._shared


def test_a_norm_over_all_heads_counts_shared_keys_once(tmp_path: Path) -> None:
    """OLMo 2's, dense: three KV heads on two parts, and on six, two of which have one KV head each."""
    folder = family_models.save(family_models.oracle_of(family_models.config_of("olmo2")), tmp_path)
    opened = open_checkpoint(folder, "fp32")
    text = text_of(opened)
    expected = whole(opened, text)
    for parts, ranks in ((2, 2), (6, 3), (6, 6)):
        alone, group = ThreadGroup(opened, parts, 1), ThreadGroup(opened, parts, ranks)
        logits = group.step(group.memory(), 0, text, len(text))
        assert torch.equal(logits, alone.step(alone.memory(), 0, text, len(text)))
        assert (logits - expected).abs().max() < EXACT


def test_experts_that_are_off_by_one_give_other_logits(tmp_path: Path) -> None:
    """The control: parts that take the matrices of their experts for those of the next ones."""
    opened = opened_model("mixtral", tmp_path)
    text = text_of(opened)
    right = deal_parts(opened.shape, 2, whole_experts=True)
    shifted = [
        replace(part, experts=range(part.experts.start + 1, part.experts.stop + 1))
        for part in right
        if part.experts is not None
    ]
    logits = []
    for dealt in (right, shifted):
        group = ThreadGroup(opened, 2, 2, whole_experts=True, dealt=dealt)
        logits.append(group.step(group.memory(), 0, text, len(text)))
    assert (logits[0] - whole(opened, text)).abs().max() < EXACT
    assert (logits[1] - logits[0]).abs().max() > 1e-2


@pytest.mark.parametrize("case", ["mixtral", "gpt_oss"])
def test_a_rank_reads_and_holds_its_experts_alone(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Separate tensors, and those of all experts in one, of which only some rows of the file are touched."""
    opened = opened_model(case, tmp_path)
    read: list[str] = []
    files = tensor_files.TensorFiles
    before, sliced = files.read, files.read_slice

    def spied(self: files, name: str, expert: int | None = None) -> torch.Tensor:  # type: ignore[valid-type]
        read.append(name if expert is None else f"{name} of {expert}")
        return before(self, name, expert)

    def spied_slice(self: files, name: str, *of: object) -> torch.Tensor:  # type: ignore[valid-type]
        assert "experts" not in name
        return sliced(self, name, *of)  # type: ignore[arg-type]

    alone = ThreadGroup(opened, 2, 1, whole_experts=True)
    monkeypatch.setattr(files, "read", spied)
    monkeypatch.setattr(files, "read_slice", spied_slice)
    group = ThreadGroup(opened, 2, 2, whole_experts=True)
    of_experts = [name for name in read if ".experts." in name]
    assert len(of_experts) == len({*of_experts}) or case == "gpt_oss"  # gate and up lie in one tensor there
    assert max(group.weight_bytes) < alone.weight_bytes[0] / 2 * 1.1


def test_more_parts_than_experts_are_refused_by_name(tmp_path: Path) -> None:
    opened = opened_model("mixtral", tmp_path)
    few = replace(opened.shape.experts, num_experts=3, experts_per_token=2)  # type: ignore[type-var]
    with pytest.raises(UnsupportedModel, match="--sum-parts 4: the model has 3 experts"):
        deal_parts(replace(opened.shape, experts=few), 4, whole_experts=True)
    dense = replace(
        opened.shape,
        experts=None,
        layers=tuple(replace(layer, experts=False) for layer in opened.shape.layers),
    )
    with pytest.raises(UnsupportedModel, match="--expert-parallel: the model has no experts"):
        deal_parts(dense, 4, whole_experts=True)
