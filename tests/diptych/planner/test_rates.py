"""Times by the roofline beside what an H200 was measured at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diptych.planner.capacity import Demand, DoesNotFit, mean_wait_s
from diptych.planner.hardware import ACCELERATORS, find_accelerator
from diptych.planner.model_costs import model_costs
from diptych.planner.model_shape import read_shape
from diptych.planner.plan import Question, make_plan
from diptych.planner.rates import Roofline
from tests.diptych.planner.shapes import LLAMA_3_8B, LLAMA_3_70B, write_config


@pytest.fixture
def h200(tmp_path: Path) -> Roofline:
    return Roofline(model_costs(read_shape(write_config(tmp_path, LLAMA_3_8B))), ACCELERATORS["h200"])


@pytest.mark.parametrize(("batch", "measured_ms"), [(1, 4.698), (8, 5.096), (64, 9.757)])
def test_steps_are_near_those_of_an_h200(h200: Roofline, batch: int, measured_ms: float) -> None:
    """The measured times are of lab/results/h200/2026-11-27-gpu.md: Llama-3-8B, context 2048."""
    assert 1000 * h200.step_s(batch, 2048) == pytest.approx(measured_ms, rel=0.1)


def test_a_prompt_is_near_that_of_an_h200(h200: Roofline) -> None:
    assert 8192 / h200.prefill_s(8192, 0) == pytest.approx(35310, rel=0.1)


def test_without_their_efficiency_they_are_not(h200: Roofline) -> None:
    ideal = Roofline(h200.costs, h200.card, decode_efficiency=1.0, prefill_efficiency=1.0)
    assert 1000 * ideal.step_s(1, 2048) < 0.8 * 4.698
    assert 8192 / ideal.prefill_s(8192, 0) > 1.5 * 35310


def test_cached_tokens_cost_attention_only(h200: Roofline) -> None:
    assert h200.prefill_s(1000, 0) < h200.prefill_s(1000, 7000) < h200.prefill_s(8000, 0)


def test_a_short_prompt_reads_all_weights(h200: Roofline) -> None:
    assert h200.prefill_s(1, 0) == pytest.approx(h200.costs.weight_bytes / (4.8e12 * 0.66), rel=1e-6)


def test_two_cards_a_worker_are_less_than_twice_as_fast(tmp_path: Path) -> None:
    costs = model_costs(read_shape(write_config(tmp_path, LLAMA_3_70B)))
    one, two = (Roofline(costs, ACCELERATORS["h100"], cards) for cards in (1, 2))
    assert 0.5 < two.step_s(16, 2000) / one.step_s(16, 2000) < 0.7
    assert 0.5 < two.prefill_s(2000, 0) / one.prefill_s(2000, 0) < 0.9


def test_eight_cards_for_prompts_of_70b_are_two_workers_at_a_high_load(tmp_path: Path) -> None:
    """The figures of docs/planning.md."""
    costs = model_costs(read_shape(write_config(tmp_path, LLAMA_3_70B)))
    four, eight = (Roofline(costs, ACCELERATORS["h100"], cards).prefill_s(2000, 0) for cards in (4, 8))
    assert (1000 * four, 1000 * eight) == (pytest.approx(144.7, abs=0.05), pytest.approx(84.8, abs=0.05))
    assert (2 / four, 1 / eight) == (pytest.approx(13.8, abs=0.05), pytest.approx(11.8, abs=0.05))
    for rate, of_two, of_one in ((2.76, 148, 98), (8.29, 185, 185), (11.06, 273, 723)):
        found = four + mean_wait_s(rate, four, 2), eight + mean_wait_s(rate, eight, 1)
        assert [1000 * one for one in found] == pytest.approx([of_two, of_one], rel=0.01)


def test_phases_have_cards_of_their_own(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, LLAMA_3_70B))
    question = Question(
        shape, ACCELERATORS["h100"], Demand(4, 2000, 300), cards_a_worker=8, dollars_an_hour=2.0
    )
    same = make_plan(question)
    apart = make_plan(replace(question, cards_a_prefill_worker=4))
    assert apart.fleet.prefill_s == pytest.approx(0.1447, abs=1e-4)
    assert apart.fleet.step_s == same.fleet.step_s
    assert same.bill is not None
    assert apart.bill is not None
    assert (same.bill.cards, apart.bill.cards) == (16, 12)
    with pytest.raises(DoesNotFit, match=r"weights of 141.1 GB do not fit into 90% of 80 GB"):
        make_plan(replace(question, cards_a_prefill_worker=1))


def test_cards_are_found_by_loose_names() -> None:
    assert find_accelerator("H100").memory == 80e9
    assert find_accelerator("RTX 4090", 48e9).memory == 48e9
    with pytest.raises(ValueError, match="known are h100"):
        find_accelerator("h999")
    assert all(card.source and card.flops["bf16"] > 1e13 for card in ACCELERATORS.values())
