"""Tables of a plan, each figure with its formula."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Group
from rich.table import Table

from diptych.planner.capacity import PAGES
from diptych.planner.plan import Plan

Row = tuple[str, str, str]
"""Name, figure, formula."""


def report(plan: Plan) -> Group:
    """Return the tables of a plan."""
    tables = [
        _table("Model", _model(plan)),
        _table("One decode worker", _decode(plan)),
        _table("Fleet", _fleet(plan)),
    ]
    if plan.bill is not None:
        tables.append(_table("Cost", _cost(plan)))
    return Group(*tables, *plan.advice)


def _table(title: str, rows: Iterator[Row]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, figure, formula in rows:
        table.add_row(name, figure, formula)
    return table


def _model(plan: Plan) -> Iterator[Row]:
    costs, question = plan.costs, plan.question
    yield "parameters", _count(costs.parameters), "all tensors, embeddings included"
    if costs.num_experts:
        yield "active parameters", _count(costs.active_parameters), "those that one token is multiplied with"
    yield "weights", _bytes(costs.weight_bytes), f"matrices in {question.weights}, the rest in bf16"
    shape = question.shape
    formula = (
        f"2 × {len(shape.attention_layers)} layers × {shape.num_kv_heads} KV heads × {shape.head_dim} wide"
    )
    yield "keys and values a token", _bytes(costs.kv_bytes), f"{formula}, {question.keys_and_values}"
    if costs.state_bytes:
        yield (
            "recurrent states a stream",
            _bytes(PAGES * costs.state_bytes),
            f"{PAGES} × those of {len(shape.recurrent_layers)} layers, float32",
        )
    if costs.held_bytes:
        yield "beside them in a step", _bytes(costs.held_bytes), "a stream: torch computes such layers"
    if (draft := plan.draft) is not None:
        yield (
            "draft model",
            _bytes(draft.weight_bytes),
            f"and {_bytes(draft.kv_bytes)} a token, beside the model",
        )


def _decode(plan: Plan) -> Iterator[Row]:
    fleet, demand = plan.fleet, plan.question.demand
    tokens = demand.input_tokens + demand.output_tokens
    each = " and the states each" if plan.costs.state_bytes else " each"
    yield (
        "streams that fit",
        f"{fleet.streams_that_fit}",
        f"memory beside the weights ÷ {tokens:.0f} tokens{each}",
    )
    yield "streams at most", f"{fleet.streams_at_most}", "those that fit, within the time between tokens"
    yield (
        "streams at this load",
        f"{fleet.streams:.1f}",
        "rate × output tokens × time between tokens (Little)",
    )
    yield "time between tokens", _ms(fleet.step_s), _goal(demand.tpot_s)


def _fleet(plan: Plan) -> Iterator[Row]:
    fleet, demand = plan.fleet, plan.question.demand
    ratio = f"{fleet.prefill_workers} : {fleet.decode_workers}"
    of_prefill, of_decode = plan.question.prefill_cards, plan.question.cards_a_worker
    each = f"{of_decode}" if of_prefill == of_decode else f"{of_prefill} : {of_decode}"
    yield (
        "prefill : decode workers",
        ratio,
        f"{each} × {plan.question.card.name} each",
    )
    yield "prefill of one prompt", _ms(fleet.prefill_s), f"{demand.new_tokens:.0f} tokens to compute"
    yield "wait for a prefill worker", _ms(fleet.wait_s), "M/D/c, mean"
    yield "time to first token", _ms(fleet.ttft_s), _goal(demand.ttft_s)
    yield "prefill workers busy", f"{fleet.prefill_busy:.0%}", "rate × prefill ÷ workers"
    yield "decode workers busy", f"{fleet.decode_busy:.0%}", "streams at this load ÷ at most"
    yield "greatest rate", f"{fleet.rate_at_most:.2f} requests/s", "of these workers, within both times"


def _cost(plan: Plan) -> Iterator[Row]:
    bill = plan.bill
    if bill is None:
        return
    yield "an hour", f"${bill.an_hour:.2f}", f"{bill.cards} cards"
    yield "a million output tokens", f"${bill.per_million_output:.2f}", "at this load"
    yield "a million output tokens", f"${bill.per_million_output_full:.2f}", "at the greatest rate"
    yield "tokens a dollar", f"{bill.tokens_per_dollar:,.0f}", "input and output"
    if bill.api_an_hour is not None and bill.break_even_rate is not None:
        yield "the API an hour", f"${bill.api_an_hour:.2f}", "its price × tokens of this load"
        yield "break-even", f"{bill.break_even_rate:.3g} requests/s", "fleet an hour ÷ API a request"


def _count(number: float) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _bytes(number: float) -> str:
    if number >= 1e9:
        return f"{number / 1e9:.2f} GB"
    return f"{number / 1e6:.0f} MB" if number >= 1e7 else f"{number / 1024:.1f} KiB"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _goal(seconds: float) -> str:
    return f"wanted: {1000 * seconds:.0f} ms" if math.isfinite(seconds) else "no limit was given"
