"""Plan of a fleet: the question, and all that follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from diptych.engine.models.shape import ModelShape
from diptych.planner.capacity import Demand, Fleet, size_fleet, worker_of
from diptych.planner.hardware import Accelerator
from diptych.planner.measured_rates import Measured
from diptych.planner.model_costs import ModelCosts, model_costs
from diptych.planner.money import ApiPrice, Bill, price_fleet
from diptych.planner.rates import PhaseRates, Rates, Roofline

IDLE = 0.095
"""Share of its time below which a phase's workers are said to be too many or too large."""


@dataclass(frozen=True)
class Question:
    """Model, card, load and prices that a fleet is planned for."""

    shape: ModelShape
    card: Accelerator
    demand: Demand
    weights: str = "bf16"
    keys_and_values: str = "bf16"
    cards_a_worker: int = 1
    """Cards of a decode worker, and of a prefill worker that has no number of its own."""
    cards_a_prefill_worker: int | None = None
    results: Sequence[Mapping[str, Any]] | None = None
    """Loads of `diptych bench`, in place of the card's limits."""
    dollars_an_hour: float | None = None
    """Price of one card."""
    api: ApiPrice | None = None
    draft: ModelShape | None = None
    """Shape of the draft model, which takes memory beside the model's; its speed is not planned."""

    @property
    def prefill_cards(self) -> int:
        """Cards of a prefill worker."""
        return self.cards_a_worker if self.cards_a_prefill_worker is None else self.cards_a_prefill_worker


@dataclass(frozen=True)
class Plan:
    """The answer."""

    question: Question
    costs: ModelCosts
    fleet: Fleet
    bill: Bill | None
    draft: ModelCosts | None = None

    @property
    def advice(self) -> list[str]:
        """Sentences on what the figures mean for the purchase."""
        fleet, found = self.fleet, []
        for phase, busy, workers in (
            ("prefill", fleet.prefill_busy, fleet.prefill_workers),
            ("decode", fleet.decode_busy, fleet.decode_workers),
        ):
            if busy < IDLE:
                what = "one is the least there is" if workers == 1 else "fewer would do"
                found.append(
                    f"The {phase} workers are busy for {busy:.0%} of their time, single-digit utilisation: "
                    f"{what}; a smaller card, several models on one card, or an API may cost less."
                )
        if fleet.prefill_busy + fleet.decode_busy < 1 and fleet.prefill_workers == fleet.decode_workers == 1:
            found.append(
                "Both phases together need less than one worker's time: one card with both workers on it "
                "may serve this load."
            )
        if self.costs.held_bytes and self.question.results is None:
            found.append(
                "Times are the card's limits. Torch computes these recurrent layers and is far from them, "
                "most of all in prompts: plan with loads that diptych bench measured (--bench)."
            )
        if self.bill is not None and self.bill.break_even_rate is not None:
            demand, rate = self.question.demand, self.bill.break_even_rate
            better = "less" if rate < demand.rate else "more"
            found.append(
                f"The fleet costs {better} than the API, which it equals at {rate:.3g} requests a second."
            )
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the plan as values for JSON."""
        costs, draft = asdict(self.costs), self.draft
        del costs["windows"]
        card = {**asdict(self.question.card), "flops": dict(self.question.card.flops)}
        return {
            "card": card,
            "cards_a_worker": self.question.cards_a_worker,
            "cards_a_prefill_worker": self.question.prefill_cards,
            "demand": {key: _finite(value) for key, value in asdict(self.question.demand).items()},
            "model": costs,
            "draft_model": None
            if draft is None
            else {name: value for name, value in asdict(draft).items() if name != "windows"},
            "fleet": asdict(self.fleet),
            "bill": None if self.bill is None else asdict(self.bill),
            "advice": self.advice,
        }


def make_plan(question: Question) -> Plan:
    """Return the smallest fleet for a question. Raises DoesNotFit or BadMeasurements."""
    costs, draft, rates = cost_and_rates(question)
    memory = question.card.memory * question.cards_a_worker
    worker_of(costs, question.card.memory * question.prefill_cards, draft).check_weights()
    fleet = size_fleet(question.demand, worker_of(costs, memory, draft), rates)
    bill = None
    if question.dollars_an_hour is not None:
        cards = (
            fleet.prefill_workers * question.prefill_cards + fleet.decode_workers * question.cards_a_worker
        )
        bill = price_fleet(question.demand, fleet, cards, question.dollars_an_hour, question.api)
    return Plan(question, costs, fleet, bill, draft)


def cost_and_rates(question: Question) -> tuple[ModelCosts, ModelCosts | None, Rates]:
    """Return what model and draft cost, and the times of a worker. Raises BadMeasurements."""
    costs = model_costs(question.shape, question.weights, question.keys_and_values)
    rates: Rates
    if question.results is None:
        prefill, decode = (
            Roofline(costs, question.card, cards)
            for cards in (question.prefill_cards, question.cards_a_worker)
        )
        rates = PhaseRates(prefill, decode)
    else:
        rates = Measured.of_results(question.results, costs.kv_bytes / costs.step_bytes(1))
    draft = None
    if question.draft is not None:
        draft = model_costs(question.draft, question.weights, question.keys_and_values)
    return costs, draft, rates


def _finite(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None
