"""Prices of a fleet: dollars an hour, a million tokens, and against an API that is paid by tokens."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.planner.capacity import Demand, Fleet

HOUR_S = 3600.0
MILLION = 1e6


@dataclass(frozen=True)
class ApiPrice:
    """Dollars of an API for a million tokens."""

    input: float
    output: float
    cached: float | None = None
    """Price of cached input tokens; None: as all others."""

    def of_request(self, demand: Demand) -> float:
        """Return the dollars of one mean request."""
        cached = demand.input_tokens * demand.prefix
        price = self.input if self.cached is None else self.cached
        paid = (demand.input_tokens - cached) * self.input + cached * price
        return (paid + demand.output_tokens * self.output) / MILLION


@dataclass(frozen=True)
class Bill:
    """Costs of a fleet, in dollars."""

    cards: int
    an_hour: float
    per_million_output: float
    """Dollars at the load that was planned for."""
    per_million_output_full: float
    """Dollars at the greatest load that the fleet serves."""
    tokens_per_dollar: float
    """Input and output tokens, at the load that was planned for."""
    api_an_hour: float | None = None
    break_even_rate: float | None = None
    """Requests a second from which on the fleet costs less than the API."""


def price_fleet(
    demand: Demand, fleet: Fleet, cards: int, dollars_an_hour: float, api: ApiPrice | None = None
) -> Bill:
    """Return what the fleet of so many cards costs where one costs `dollars_an_hour`."""
    an_hour = cards * dollars_an_hour
    outputs = demand.rate * demand.output_tokens * HOUR_S
    tokens = demand.rate * (demand.input_tokens + demand.output_tokens) * HOUR_S
    full = fleet.rate_at_most * demand.output_tokens * HOUR_S
    request = api.of_request(demand) if api is not None else None
    return Bill(
        cards=cards,
        an_hour=an_hour,
        per_million_output=an_hour / outputs * MILLION,
        per_million_output_full=an_hour / full * MILLION,
        tokens_per_dollar=tokens / an_hour if an_hour else float("inf"),
        api_an_hour=None if request is None else request * demand.rate * HOUR_S,
        break_even_rate=None if not request else an_hour / HOUR_S / request,
    )
