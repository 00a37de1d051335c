"""Targets of the interference benchmark, judged by medians over rounds of figures of several systems."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diptych.bench.measurement import Figures
from lab.interference.systems import APART, LENDING, WIDE

Round = Mapping[str, Figures]
"""The figures of each system by its name."""

START = "start_s"


@dataclass(frozen=True)
class Target:
    """`value` should be `direction` `bound`. The values are of rounds; a ratio is one within a round."""

    what: str
    direction: str
    bound: float
    values: tuple[float, ...]

    @property
    def value(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.bound if self.direction == "at most" else self.value >= self.bound


def targets(rounds: Sequence[Round]) -> list[Target]:
    """Return the targets in the order in which they were set."""
    beside, alone = (APART, "p99_itl_beside_ms"), (APART, "p99_itl_alone_ms")
    prompts_beside, prompts = (APART, "prompt_throughput_beside"), (APART, "prompt_throughput_alone")
    return [
        _ratio(rounds, "ITL p99 of 8 streams, beside prompts / alone", "at most", 1.3, beside, alone),
        _ratio(rounds, "prefill tokens/s, beside streams / alone", "at least", 0.9, prompts_beside, prompts),
        _lent(rounds, "8 streams alone: ITL p50, lending / all cores", "median_itl_alone_ms"),
        _lent(rounds, "one stream alone: ITL p50, lending / all cores", "median_itl_one_ms"),
        _lent(rounds, "lone 512-token prompt: TTFT p50, lending / all cores", "median_ttft_prompt_ms"),
        _ratio(
            rounds,
            "2,000 cached tokens: TTFT, again / the first time",
            "at most",
            0.1,
            (LENDING, "median_ttft_cached_ms"),
            (LENDING, "median_ttft_cold_ms"),
        ),
        Target("start until ready, s", "at most", 10.0, tuple(_values(rounds, LENDING, START))),
    ]


def medians(rounds: Sequence[Round], system: str) -> Figures:
    """Return each figure's median over the rounds that have it."""
    names = {name: None for one in rounds for name in one.get(system, {})}
    found = {name: _values(rounds, system, name) for name in names}
    return {name: statistics.median(values) if values else None for name, values in found.items()}


def spread(rounds: Sequence[Round], system: str, name: str) -> tuple[float, float] | None:
    """Smallest and largest value of a round."""
    values = _values(rounds, system, name)
    return (min(values), max(values)) if values else None


def _lent(rounds: Sequence[Round], what: str, name: str) -> Target:
    return _ratio(rounds, what, "at most", 1.15, (LENDING, name), (WIDE, name))


def _ratio(
    rounds: Sequence[Round],
    what: str,
    direction: str,
    bound: float,
    upper: tuple[str, str],
    lower: tuple[str, str],
) -> Target:
    values = []
    for one in rounds:
        above, below = (one.get(system, {}).get(name) for system, name in (upper, lower))
        if above is not None and below:
            values.append(above / below)
    return Target(what, direction, bound, tuple(values))


def _values(rounds: Sequence[Round], system: str, name: str) -> list[float]:
    return [value for one in rounds if (value := one.get(system, {}).get(name)) is not None]
