"""Rows that the Triton step sends to their experts: transformers' tokens, and the same bits at every degree.

The operators are their meanings and ranks are threads, but for one test: the kernels in Triton's interpreter,
in processes that exchange over Gloo.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.engine.backends.triton import parts_experts
from diptych.engine.backends.triton.expert_exchange import CountedTrip, ExpertRanks, WholeTrip
from diptych.engine.backends.triton.parts_backend import TritonPartsBackend
from diptych.engine.parallel.communicator import Alone
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.engine.weights.reader import OpenCheckpoint
from tests.diptych.engine.backends.triton import parts_process
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.diptych.engine.backends.triton.test_parts_backend import SENT, Recorded, TritonRanks
from tests.diptych.engine.models import expert_models
from tests.diptych.engine.parallel.part_checks import GREEDY
from tests.diptych.engine.parallel.test_communicators import free_port
from tests.diptych.engine.parallel.thread_ranks import ThreadGroup
from tests.forms import sampled
from tests.triton_device import device_of

FAMILIES = ["mixtral", "qwen3_moe", "qwen3_moe-dense-layers", "qwen2_moe", "olmoe", "granitemoe", "glm4_moe"]
"""Families of the Triton step: plain experts, dense layers, shared experts with a gate and without."""

pytestmark = pytest.mark.usefixtures("one_thread")


def opened_model(name: str, folder: Path) -> tuple[OpenCheckpoint, Any]:
    oracle = expert_models.oracle_of(name)
    oracle.save_pretrained(folder)
    return open_checkpoint(folder, "fp32"), oracle


def text_of(opened: OpenCheckpoint, tokens: int = 20) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, opened.shape.vocab_size, (tokens,), generator=generator).tolist()


@pytest.mark.parametrize("case", sampled(FAMILIES, {"mixtral", "qwen3_moe", "qwen2_moe"}))
def test_every_degree_goes_on_with_the_same_bits_as_transformers_does(case: str, tmp_path: Path) -> None:
    """A prompt, and decode steps of one row: three of four ranks have none."""
    opened, oracle = opened_model(case, tmp_path)
    text, found = text_of(opened), {}
    for ranks in (1, 2, 4):
        group = TritonRanks(opened, 4, ranks, **SENT)
        memory = group.memory()
        group.step(memory, 0, text[:-1])
        found[ranks] = *group.decode(memory, text, GREEDY), memory.data.clone()
    assert expert_models.is_greedy(oracle, text, found[1][0])
    for ranks in (2, 4):
        assert found[ranks][0] == found[1][0]
        assert torch.equal(found[ranks][1], found[1][1])
        assert torch.equal(found[ranks][2], found[1][2])


@pytest.mark.parametrize(("case", "ranks", "stages"), sampled(
    [("mixtral", 2, 1), ("qwen2_moe", 2, 1), ("qwen2_moe", 1, 2)], {("qwen2_moe", 2, 1)}))  # fmt: skip
def test_recorded_steps_have_the_bits_of_those_whose_rows_are_counted(
    case: str, ranks: int, stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded step exchanges rows in sizes that are known before, and no other step does."""
    opened, oracle = opened_model(case, tmp_path)
    trips = {"CountedTrip": 0, "WholeTrip": 0}

    def counting(made: type[Any]) -> Any:
        def make(*given: Any) -> Any:
            trips[made.__name__] += 1
            return made(*given)

        return make

    for made in (CountedTrip, WholeTrip):
        monkeypatch.setattr(parts_experts, made.__name__, counting(made))
    text, alone = text_of(opened), TritonRanks(opened, 2, 1, **SENT)
    kept = alone.memory()
    alone.step(kept, 0, text[:-1])
    expected = alone.decode(kept, text, GREEDY)[0]
    assert trips["WholeTrip"] == 0
    recorded = Recorded(opened, text, ranks, stages, **SENT)
    counted = trips["CountedTrip"]
    assert recorded.steps() == expected
    assert torch.equal(recorded.memory.data, kept.data)
    assert expert_models.is_greedy(oracle, text, expected)
    assert trips["CountedTrip"] == counted
    assert trips["WholeTrip"] > 0


def by_processes(ranks: int, parts: int, folder: Path) -> list[str]:
    """Return the tokens of a group of processes, and the digest of its logits."""
    port, environment = str(free_port()), {**os.environ, "TRITON_INTERPRET": "1"}
    given = [sys.executable, "-m", parts_process.__name__]
    processes = [
        subprocess.Popen(
            [*given, str(rank), str(ranks), str(parts), port, str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks
    return said[0].split()


@pytest.mark.parametrize(("case", "degrees"), sampled(
    [("qwen2_moe", (2,)), ("qwen3_moe", (2, 4)), ("mixtral", (2, 4))], ()
))  # fmt: skip
def test_processes_send_rows_with_the_kernels(case: str, degrees: Sequence[int], tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    _, oracle = opened_model(case, tmp_path)
    device_of("cpu")
    expected = parts_process.answer_of(Alone(), max(degrees), tmp_path)
    for ranks in degrees:
        assert by_processes(ranks, max(degrees), tmp_path) == expected
    tokens = [int(token) for token in expected[:-1]]
    assert len(tokens) == parts_process.TOKENS
    assert expert_models.is_greedy(oracle, parts_process.PROMPT, tokens)


def logits_of(opened: OpenCheckpoint, group: ThreadGroup) -> torch.Tensor:
    text = text_of(opened)
    return group.step(group.memory(), 0, text, len(text))


@pytest.mark.parametrize("wrong", ["rank", "places"])
def test_rows_that_go_to_other_ranks_or_come_back_to_other_places_give_other_logits(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controls: one expert's rows go to the rank before, which has not got it."""
    opened, _ = opened_model("mixtral", tmp_path)
    expected = logits_of(opened, TritonRanks(opened, 2, 2, **SENT))
    here, back = ExpertRanks.here, CountedTrip.bring_back
    if wrong == "rank":

        def shifted(self: ExpertRanks, experts: torch.Tensor, rank: int) -> torch.Tensor:
            first = self.spans[1].start
            return here(self, torch.where(experts == first, first - 1, experts), rank)

        monkeypatch.setattr(ExpertRanks, "here", shifted)
    else:
        monkeypatch.setattr(CountedTrip, "bring_back", lambda self, given: back(self, given).roll(1, 0))
    found = logits_of(opened, TritonRanks(opened, 2, 2, **SENT))
    assert not (found - expected).abs().max() < 1e-2  # numbers that nobody made may be NaN


@pytest.mark.parametrize("wrong", ["rank", "places"])
def test_recorded_rows_that_go_elsewhere_give_other_tokens(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controls of recorded steps."""
    opened, _ = opened_model("mixtral", tmp_path)
    text, back, holders = text_of(opened), WholeTrip.bring_back, ExpertRanks.holders
    expected = Recorded(opened, text, 2, **SENT).steps()
    if wrong == "rank":
        monkeypatch.setattr(ExpertRanks, "holders", lambda self, experts: 1 - holders(self, experts))
    else:
        monkeypatch.setattr(WholeTrip, "bring_back", lambda self, given: back(self, given).roll(1, 0))
    assert Recorded(opened, text, 2, **SENT).steps() != expected  # none where numbers are NaN


def test_experts_that_are_added_in_another_order_give_other_bits(tmp_path: Path) -> None:
    """The control of the bits: the same numbers, from the last expert of a row to the first."""

    def backwards(parts: torch.Tensor, routed: Any, *rest: Any, out: torch.Tensor) -> torch.Tensor:
        tokens, count = routed.experts.shape
        turned = parts.view(tokens, count, -1).flip(1).flatten(0, 1)
        other = replace(routed, experts=routed.experts.flip(1), weights=routed.weights.flip(1))
        return REFERENCE_OPERATORS.sum_experts(turned, other, *rest, out=out)

    opened, _ = opened_model("mixtral", tmp_path)
    operators = replace(REFERENCE_OPERATORS, sum_experts=backwards)
    make = partial(TritonPartsBackend, device="cpu", operators=operators)
    right = logits_of(opened, TritonRanks(opened, 2, 2, **SENT))
    wrong = logits_of(opened, ThreadGroup(opened, 2, 2, make=make, **SENT))
    assert (wrong - right).abs().max() < 1e-3
    assert not torch.equal(wrong, right)


def test_the_expert_of_every_token_is_held_once(tmp_path: Path) -> None:
    opened, _ = opened_model("qwen2_moe", tmp_path)
    group = TritonRanks(opened, 4, 2, **SENT)
    for backend in group.backends:
        first, second = (
            next(layer.experts for layer in half.weights.layers if layer.experts is not None)
            for half in backend._layers._halves
        )
        assert first.shared_gate_up is not None
        assert first.shared_gate_up is second.shared_gate_up
        assert first.shared_down is second.shared_down
        assert first.gate_up is not second.gate_up
